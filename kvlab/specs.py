"""The nouns of the cost model: one layer, one model, one machine.

Nothing here computes a cost and nothing reads a file format: `kvlab.configs` turns a
Hugging Face config.json into a ModelSpec, `kvlab.costs` turns a ModelSpec into numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).resolve().parent
#: The folder of facts. Beside the package in a checkout, inside it once installed.
DATA_DIR = next((p for p in (_HERE / "data", _HERE.parent / "data") if p.is_dir()), _HERE / "data")

#: Every way in which a layer can (or cannot) keep something between two decode steps.
LAYER_KINDS = ("full", "sliding", "chunked", "latent", "recurrent", "shared", "none")


@dataclass(frozen=True)
class StateSpec:
    """A fixed piece of per-sequence state, such as a Mamba convolution buffer."""

    name: str
    num_elements: int | None  # None: the config does not tell its size
    bytes_per_element: int | None = None  # None: the KV dtype decides


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps per cached token.

    kind        one of LAYER_KINDS
    key_dim     width of one cached K row per KV head. A latent (MLA) layer caches one row of
                kv_lora_rank + qk_rope_head_dim, so it has num_kv_heads = 1 and value_dim = 0.
    window      tokens a sliding or chunked layer can ever look back on (the current one included)
    shares_layer   index of the layer whose K and V a "shared" layer reads
    state       fixed per-sequence state of a "recurrent" layer (or of one that also attends)
    index_dim   width of the key that an indexer of sparse attention keeps beside the row
    compress    of a layer with a window: one more row is kept for good for so many tokens
    expanded    of a latent layer: the same layer with K and V written out for every query head,
                which is what an engine that does not absorb the projections stores instead
    """

    kind: str
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    shares_layer: int | None = None
    state: tuple[StateSpec, ...] = ()
    expanded: LayerSpec | None = None
    index_dim: int = 0
    compress: int = 0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding settings of a layer: base, rotated width, scaling rule."""

    theta: float = 10_000.0
    rotary_dim: int = 0  # rotated dimensions of each head; the rest pass through
    rope_type: str = "default"  # default, linear, dynamic, llama3, yarn, longrope, none
    params: tuple[tuple[str, object], ...] = ()  # the scaling rule's own settings, sorted by name


@dataclass(frozen=True)
class ModelSpec:
    """A decoder's shape. Names are those of vLLM and of config.json.

    layers has num_layers entries: the resolved list, so that patterns ("every sixth layer is
    full") are visible. notes says what the reader of a config had to decide for itself.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int | None
    vocab_size: int
    layers: tuple[LayerSpec, ...] = ()
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int | None = None
    rope: RopeSpec = field(default_factory=RopeSpec)
    rope_local: RopeSpec | None = None  # of the sliding layers, where it differs
    model_type: str = "llama"
    is_dense_llama: bool = True  # the parameter formulas of costs.py hold for it
    unsupported: str = ""  # why the decoder of model.py cannot run it; empty: it can
    qk_norm: bool = False  # an RMSNorm over each head of Q and K, before the rotation (Qwen3)
    biased: tuple[str, ...] = ()  # projections with a bias: ("q_proj", "k_proj", "v_proj") in Qwen2
    fused_projections: bool = False  # Phi-3 stores q, k, v as one matrix, and gate, up as another
    unrotated_layers: tuple[int, ...] = ()  # layers without a rotation (SmolLM3)
    notes: tuple[str, ...] = ()
    mtp_layers: tuple[LayerSpec, ...] = ()  # multi-token prediction layers, outside num_layers

    @property
    def layer_groups(self) -> tuple[tuple[int, LayerSpec], ...]:
        """(count, layer) for each distinct layer, in order of first appearance."""
        return tuple((count, layer) for layer, count in Counter(self.layers).items())


@dataclass(frozen=True)
class HardwareSpec:
    """One device, from its datasheet. FLOP/s are dense (no sparsity). Bytes are bytes."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_second: float
    peak_flops_per_second: dict[str, float]  # by dtype name: fp32, fp16, bf16, fp8
    num_multiprocessors: int | None = None
    compute_capability: str | None = None
    driver_memory_bytes: int | None = None  # what the driver reports, where published
    source: str = ""
