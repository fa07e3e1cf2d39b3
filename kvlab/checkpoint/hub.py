"""Put a Hugging Face hub model's files into a folder. Run as a program.

    python -m kvlab.checkpoint.hub ORG/NAME OUT

The hub's client checks each file's hash. Pickled weights (.bin) are left alone on purpose.
"""

from __future__ import annotations

import sys

from huggingface_hub import snapshot_download

FILES = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors",
         "model.safetensors.index.json", "model-*.safetensors"]

if __name__ == "__main__":
    snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=FILES)
