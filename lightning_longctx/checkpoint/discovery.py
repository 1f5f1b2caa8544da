"""Which checkpoints a folder holds, and which of them are intact.

A directory counts if its name is that of a checkpoint and its commit record is intact, names this directory, and every
file has the recorded size. Neither names, times nor ``LATEST.json`` are trusted. The newest is the one that was
committed last, not the one with the highest step: a run that went back to an earlier step is continued where it is now.
"""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_longctx.checkpoint.layout import COMMIT, STAGING, Commit, parse_name
from lightning_longctx.errors import CheckpointError

__all__ = [
    "DEEP_BYTES",
    "Found",
    "file_problem",
    "find_latest",
    "is_checkpoint",
    "leased",
    "reading",
    "scan",
    "verify",
    "was_verified",
]

#: Up to this size checksums are compared before a resume: about a minute. Above it sizes are, and the checksums of
#: everything that is not tensor data; ``longctx checkpoint verify --deep`` compares them all.
DEEP_BYTES = 64 * 2**30

_verified: set[tuple[str, str, int]] = set()

_PIECE = 16 * 2**20
_LEASE_SECONDS = 3600.0


@dataclass(frozen=True)
class Found:
    """A directory that bears a checkpoint's name.

    Attributes:
        path: where it is.
        commit: its record; None if that is missing or damaged.
        problem: why it cannot be used; empty if it can.
    """

    path: Path
    commit: Commit | None
    problem: str = ""


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory with a commit record."""
    return (Path(path) / COMMIT).is_file()


def scan(dirpath: str | os.PathLike[str]) -> list[Found]:
    """All directories with a checkpoint's name, the newest commit first; those without a record come last.

    Args:
        dirpath: the folder; one that does not exist holds none.
    """
    root = Path(dirpath)
    names = os.listdir(root) if root.is_dir() else []
    found = [_look(root / name) for name in sorted(names, reverse=True) if parse_name(name)]
    return sorted(found, key=lambda item: item.commit.sequence if item.commit else -1, reverse=True)


def find_latest(dirpath: str | os.PathLike[str], resumable: bool = True, deep_bytes: int = DEEP_BYTES) -> Found | None:
    """The newest checkpoint that verifies.

    Args:
        dirpath: the folder.
        resumable: only those that training can go on from. False: those with weights.
        deep_bytes: compare the checksums of tensor data up to this size in all.

    Returns:
        None if no directory bears a checkpoint's name. Newer ones that are damaged are named in a warning.

    Raises:
        CheckpointError: there are directories, and none can be used.
    """
    # Those without a record first: they cannot be used, and how new they were nobody knows.
    candidates = sorted(scan(dirpath), key=lambda found: found.commit is not None)
    rejected: list[str] = []
    for found in candidates:
        problem = found.problem or _use_problem(found, resumable) or verify(found.path, deep_bytes)
        if not problem:
            if rejected:
                warnings.warn(f"Falling back to {found.path.name}: {'; '.join(rejected)}", UserWarning, stacklevel=2)
            return found
        if found.problem or not _use_problem(found, resumable):  # a weights-only checkpoint is no damage
            rejected.append(f"{found.path.name}: {problem}")
    if not candidates:
        return None
    got = "; ".join(rejected) or f"{len(candidates)} without an optimizer, for evaluation only"
    fix = "Restore one of them, or name another folder (`dirpath`) to start anew."
    raise CheckpointError(str(dirpath), "must hold a checkpoint that can be used", got, fix)


def verify(checkpoint: Path, deep_bytes: int | None = None) -> str:
    """What is wrong with a checkpoint; empty if nothing is.

    Args:
        checkpoint: its directory.
        deep_bytes: compare the checksums of tensor data only if it has at most so many bytes; None: always.
    """
    found = _look(checkpoint)
    if found.commit is None or found.problem:
        return found.problem
    deep = deep_bytes is None or found.commit.size <= deep_bytes
    names = [name for name in found.commit.files if deep or not name.endswith(".distcp")]
    problem = next((problem for name in names if (problem := file_problem(checkpoint, found.commit, name))), "")
    if deep and not problem:
        _verified.add(_identity(checkpoint, found.commit))
    return problem


def was_verified(checkpoint: Path, commit: Commit) -> bool:
    """Whether this process has found all checksums right already: what was looked for is not read twice."""
    return _identity(checkpoint, commit) in _verified


def file_problem(checkpoint: Path, commit: Commit, name: str) -> str:
    """What is wrong with one file of a checkpoint; empty if nothing is."""
    if name not in commit.files:
        return f"{name} is not in the record"
    try:
        value = _crc32(checkpoint / name)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return "" if value == commit.files[name].crc32 else f"{name} has a wrong checksum"


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Keep retention from removing a checkpoint while it is read, for an hour at most.

    A folder that cannot be written to has no retention either.
    """
    lease = checkpoint.parent / STAGING / f"lease-{checkpoint.name}-{os.getpid()}"
    try:
        lease.parent.mkdir(exist_ok=True)
        lease.touch()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        lease.unlink(missing_ok=True)


def leased(root: Path) -> set[str]:
    """Names of the checkpoints that are being read."""
    folder, now = root / STAGING, time.time()
    names = set()
    for lease in folder.glob("lease-*"):
        try:
            fresh = now - lease.stat().st_mtime < _LEASE_SECONDS
        except FileNotFoundError:
            continue
        if fresh:
            names.add(lease.name.removeprefix("lease-").rpartition("-")[0])
    return names


def _look(path: Path) -> Found:
    try:
        commit = Commit.read(path)
    except CheckpointError as error:
        return Found(path, None, f"{COMMIT}: {error.got}")
    for name, facts in commit.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return Found(path, commit, f"{name} is missing")
        if size != facts.size:
            return Found(path, commit, f"{name} has {size} instead of {facts.size} bytes")
    return Found(path, commit)


def _identity(checkpoint: Path, commit: Commit) -> tuple[str, str, int]:
    return str(checkpoint.resolve()), commit.run, commit.sequence


def _use_problem(found: Found, resumable: bool) -> str:
    assert found.commit is not None
    if resumable:
        return "" if found.commit.resumable else "holds weights only"
    return "" if "weights" in found.commit.slots else "holds no weights"


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value
