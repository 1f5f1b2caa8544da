"""Which checkpoints a folder holds, and which of them are intact.

A directory counts if its name is that of a checkpoint and its commit record is intact, names this directory, and every
file has the recorded size. Neither names, times nor ``LATEST.json`` are trusted. The newest is the one that was
committed last, not the one with the highest step: a run that went back to an earlier step is continued where it is now.

A directory of this machine gets such a name with its record inside, so one without is damaged. On a store that cannot
rename it is being written, or was given up: no checkpoint, and no fault.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from lightning_longctx.checkpoint.address import (
    Address,
    Folder,
    PathLike,
    as_folder,
    file_sizes,
    names_in,
    range_reader,
)
from lightning_longctx.checkpoint.layout import COMMIT, LEASE, STAGING, Commit, parse_name
from lightning_longctx.checkpoint.notes import owner_note
from lightning_longctx.checkpoint.object_store import filesystem_of
from lightning_longctx.errors import CheckpointError
from lightning_longctx.units import counted

__all__ = [
    "DEEP_BYTES",
    "Found",
    "as_checkpoint",
    "check_one_checkpoint",
    "file_problem",
    "find_latest",
    "is_checkpoint",
    "reading",
    "scan",
    "verify",
    "was_verified",
]

#: Up to this size checksums are compared before a resume: about a minute. Above it sizes are, and the checksums of
#: everything that is not tensor data; ``longctx checkpoint verify --deep`` compares them all.
DEEP_BYTES = 64 * 2**30

_verified: set[tuple[str, str, int]] = set()

# On a store a request each: large enough that the wait for an answer does not count.
_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Found:
    """A directory that bears a checkpoint's name.

    Attributes:
        path: where it is.
        commit: its record; None if that is missing or damaged.
        problem: why it cannot be used; empty if it can.
    """

    path: Folder
    commit: Commit | None
    problem: str = ""


def as_checkpoint(path: PathLike) -> Folder:
    """The directory that is meant by its own path, or by that of its record.

    Lightning asks when what ``last`` found was changed, which on a store the record knows and a directory does not.
    """
    folder = as_folder(path, "ckpt_path")
    return folder.parent if folder.name == COMMIT else folder


def is_checkpoint(path: PathLike) -> bool:
    """Whether a path is a directory with a commit record."""
    return (as_checkpoint(path) / COMMIT).is_file()


def check_one_checkpoint(path: PathLike) -> None:
    """Refuse the folder that checkpoints are in where one of them is meant; anything else may be somebody's.

    Raises:
        CheckpointError: such a folder.
    """
    folder = as_checkpoint(path)
    if not folder.is_file() and not is_checkpoint(folder) and (inside := scan(folder)):
        got = f"the folder of {counted(len(inside), 'checkpoint')}"
        fix = f"Name one of them, such as {inside[0].path}, or write `ckpt_path: last` for the newest of `dirpath`."
        raise CheckpointError(str(folder), "must be one checkpoint", got, fix)


def scan(dirpath: PathLike) -> list[Found]:
    """All directories with a checkpoint's name, the newest commit first; those without a record come last.

    Args:
        dirpath: the folder; one that does not exist holds none.

    Raises:
        CheckpointError: a folder that cannot be read, or a store that does not answer.
    """
    root = as_folder(dirpath, "dirpath")
    try:
        found = [_look(root / name) for name in sorted(names_in(root), reverse=True) if parse_name(name)]
        if isinstance(root, Address):  # it has no record, or it was removed while we looked
            found = [one for one in found if not one.problem or is_checkpoint(one.path)]
    except OSError as error:
        fix = "Check the path or address, and the rights to it (credentials in the environment)."
        raise CheckpointError(str(root), "must be a folder that can be read", error.strerror, fix) from error
    return sorted(found, key=lambda item: item.commit.sequence if item.commit else -1, reverse=True)


def find_latest(dirpath: PathLike, resumable: bool = True, deep_bytes: int = DEEP_BYTES) -> Found | None:
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


def verify(checkpoint: Folder, deep_bytes: int | None = None) -> str:
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


def was_verified(checkpoint: Folder, commit: Commit) -> bool:
    """Whether this process has found all checksums right already: what was looked for is not read twice."""
    return _identity(checkpoint, commit) in _verified


def file_problem(checkpoint: Folder, commit: Commit, name: str) -> str:
    """What is wrong with one file of a checkpoint; empty if nothing is."""
    if name not in commit.files:
        return f"{name} is not in the record"
    path, size = checkpoint / name, commit.files[name].size
    try:
        if isinstance(path, Path) and path.stat().st_size != size:  # an object cannot grow
            return f"{name} has {path.stat().st_size} instead of {size} bytes"
        value = _crc32(path, size)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return "" if value == commit.files[name].crc32 else f"{name} has a wrong checksum"


@contextmanager
def reading(checkpoint: Folder) -> Iterator[None]:
    """Keep retention from removing a checkpoint while it is read, for an hour at most.

    A folder that cannot be written to has no retention either.
    """
    filesystem, folder = filesystem_of(checkpoint), checkpoint.parent / STAGING
    lease = folder / f"{LEASE}{checkpoint.name}-{uuid4().hex[:8]}"
    try:
        filesystem.make_directory(folder)
        filesystem.note(lease, owner_note())
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # it is worth nothing in an hour
            filesystem.remove_file(lease)


def _look(path: Folder) -> Found:
    try:
        commit = Commit.read(path)
    except CheckpointError as error:
        return Found(path, None, f"{COMMIT}: {error.got}")
    for name, size in file_sizes(path, commit.files):
        if size is None:
            return Found(path, commit, f"{name} is missing")
        if size != commit.files[name].size:
            return Found(path, commit, f"{name} has {size} instead of {commit.files[name].size} bytes")
    return Found(path, commit)


def _identity(checkpoint: Folder, commit: Commit) -> tuple[str, str, int]:
    return str(checkpoint.resolve()), commit.run, commit.sequence


def _use_problem(found: Found, resumable: bool) -> str:
    assert found.commit is not None
    if resumable:
        return "" if found.commit.resumable else "holds weights only"
    return "" if "weights" in found.commit.slots else "holds no weights"


def _crc32(path: Folder, size: int) -> int:
    value = 0
    with range_reader(path) as read:
        for start in range(0, size, _PIECE):
            value = zlib.crc32(read(start, min(start + _PIECE, size)), value)
    return value
