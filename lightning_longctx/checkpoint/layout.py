"""Names in a folder of checkpoints, and the records that say what a checkpoint holds.

::

    <dirpath>/
      step-00000120-7f3a9c1e/     step and attempt; immutable once it has this name
        COMMIT.json               what it holds, with size and CRC32 of every file
        weights.done.json  optimizer.done.json
        weights/  optimizer/      one DCP directory each
        extra/rank-00000.pt       what is no tensor of the model or optimizer: loops, data, random numbers, callbacks
      .staging/                   being written or removed; never looked at by discovery
      LATEST.json                 for people; discovery does not trust it

A store without atomic rename has no directories in ``.staging/``, only notes. There files have their final names from
the start, and a checkpoint is what has a ``COMMIT.json``.
"""

from __future__ import annotations

import json
import os
import re
import threading
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.errors import CheckpointError

__all__ = [
    "COMMIT",
    "LATEST",
    "LEASE",
    "METADATA",
    "OPTIMIZER",
    "OWNER",
    "PACKED_INDEX",
    "SCORES",
    "SLOTS",
    "STAGING",
    "TEMPORARY",
    "TOMBSTONE",
    "WEIGHTS",
    "Commit",
    "FileFacts",
    "checkpoint_name",
    "done_marker",
    "extra_file",
    "is_owner_file",
    "is_stage_of_rank",
    "owner_file",
    "parse_name",
    "read_sealed",
    "seal",
    "stage_of_rank",
]

WEIGHTS, OPTIMIZER = "weights", "optimizer"
#: In the order in which ranks agree on them.
SLOTS = (WEIGHTS, OPTIMIZER)
COMMIT, LATEST, SCORES = "COMMIT.json", "LATEST.json", "scores.json"
STAGING = ".staging"
LEASE, TOMBSTONE = "lease-", "del-"
#: Behind the name of a file that is to be replaced, in that of what will replace it.
TEMPORARY = ".tmp-"
METADATA = ".metadata"
PACKED_INDEX = "packed.json"
OWNER = ".owner"
_SCHEMA = 1
_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})")
_STAGE_OF_RANK = re.compile(rf"{_NAME.pattern}-\d+-\d+({re.escape(OWNER)})?")


def checkpoint_name(step: int, attempt: str) -> str:
    """Directory name of a checkpoint.

    Example:
        >>> checkpoint_name(120, "7f3a9c1e")
        'step-00000120-7f3a9c1e'
    """
    return f"step-{step:08d}-{attempt}"


def parse_name(name: str) -> tuple[int, str] | None:
    """Step and attempt of a directory name; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def extra_file(rank: int) -> str:
    """Where the extra state of a rank is, relative to the checkpoint."""
    return f"extra/rank-{rank:05d}.pt"


def owner_file(name: str) -> str:
    """Name of the note in the staging folder that says who writes a checkpoint."""
    return f"{name}{OWNER}"


def is_owner_file(name: str) -> bool:
    """Whether a name in the staging folder is that of such a note."""
    return name.endswith(OWNER)


def stage_of_rank(name: str) -> str:
    """Name of the folder in which this thread writes its part of a checkpoint, on a node-local disk."""
    return f"{name}-{os.getpid()}-{threading.get_ident()}"


def is_stage_of_rank(name: str) -> bool:
    """Whether a name is that of such a folder, or of the note beside it that says whose it is."""
    return _STAGE_OF_RANK.fullmatch(name) is not None


def done_marker(slot: str) -> str:
    """Name of the marker that a slot's files are all there."""
    return f"{slot}.done.json"


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and CRC32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Commit:
    """What a checkpoint holds. Its presence, intact, is what makes a directory a checkpoint.

    Attributes:
        step: optimizer steps done.
        attempt: id of the save, 8 hexadecimal digits, new for each.
        sequence: number of the save in this folder: the newest checkpoint is the one with the highest.
        run: id of the run, kept over its resumes. Retention removes checkpoints of its own run only.
        slots: ``weights`` and ``optimizer``, ``weights`` alone, or none (a run that trains nothing).
        resumable: whether training can go on from here.
        trainable_only: the weights are those of trainable parameters only.
        ranks: data-parallel and sequence-parallel rank of each rank.
        accumulate: micro-batches of a step.
        files: of every file of the checkpoint but this record, by path relative to the checkpoint.
        versions: of torch and of this package, for people.
    """

    step: int
    attempt: str
    sequence: int
    run: str
    slots: list[str]
    resumable: bool
    trainable_only: bool
    ranks: list[list[int]]
    accumulate: int
    files: dict[str, FileFacts] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the directory."""
        return checkpoint_name(self.step, self.attempt)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        return seal({"schema": _SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, checkpoint: Folder) -> Commit:
        """Read the record of a checkpoint and check it against its name.

        Raises:
            CheckpointError: it is missing, damaged, of another schema, or of another directory.
        """
        body = read_sealed(checkpoint / COMMIT)
        if body.get("schema") != _SCHEMA:
            fix = "Read it with the version that wrote it."
            raise CheckpointError(str(checkpoint / COMMIT), f"must have schema {_SCHEMA}", body.get("schema"), fix)
        values = {item.name: body[item.name] for item in fields(cls)}
        values["files"] = {name: FileFacts(**facts) for name, facts in body["files"].items()}
        commit = cls(**values)
        if commit.name != checkpoint.name:
            fix = "Give the directory its own name back."
            raise CheckpointError(str(checkpoint), "must be named after its step and attempt", commit.name, fix)
        return commit


def seal(body: Mapping[str, Any]) -> bytes:
    """JSON with the CRC32 of its body."""
    text = _canonical(body)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n'.encode()


def read_sealed(path: Folder) -> dict[str, Any]:
    """Read what :func:`seal` made.

    Raises:
        CheckpointError: no such file, or damaged.
    """
    try:
        content = json.loads(path.read_text())
        body: dict[str, Any] = content["body"]
        intact = zlib.crc32(_canonical(body).encode()) == content["crc32"]
    except OSError as error:
        raise CheckpointError(str(path), "must be readable", error.strerror, "Use another checkpoint.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(str(path), "must be intact", f"no sealed JSON ({error})", "Use another one.") from error
    if not intact:
        raise CheckpointError(str(path), "must be intact", "a wrong checksum", "Use another checkpoint.")
    return body


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
