"""States that carry their step in every value, and the check that a folder of checkpoints holds no other."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.checkpoint.address import PathLike, as_folder, names_in
from lightning_longctx.checkpoint.discovery import scan, verify
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import STAGING, extra_file, parse_name
from lightning_longctx.checkpoint.notes import owner_note
from lightning_longctx.checkpoint.plain import load_plain
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.retention import Retention
from lightning_longctx.checkpoint.writer import CheckpointWriter, SaveRequest, WriterSettings

#: Small ones are packed at this limit, the large one is not.
PACK_BELOW = 256
SHORT = timedelta(seconds=8)


def state(step: int, slot: str = "weights") -> dict[str, Tensor]:
    """Two large and three small tensors, all full of ``step``."""
    tensors = {f"{slot}.large": torch.full((8, 32), float(step)), f"{slot}.table": torch.full((100,), step)}
    return tensors | {f"{slot}.small.{n}": torch.full((n + 1,), float(step)) for n in range(3)}


def request(step: int, rank: int = 0, slots: tuple[str, ...] = ("weights", "optimizer"), **more: Any) -> SaveRequest:
    extra = {"step": step, "rank": rank}
    return SaveRequest(step, {slot: state(step, slot) for slot in slots}, extra, **more)


def writer(
    root: PathLike, filesystem: FileSystem | None = None, keep: int = 2, timeout: timedelta = SHORT, **more: Any
) -> CheckpointWriter:
    """An open writer."""
    settings = WriterSettings(timeout=timeout, pack_below=PACK_BELOW, retention=Retention(keep_last=keep), **more)
    made = CheckpointWriter(as_folder(root), settings, filesystem)
    made.open()
    return made


def save(checkpoints: CheckpointWriter, step: int, **more: Any) -> None:
    """Save and wait for the commit."""
    checkpoints.save(request(step, checkpoints.rank, **more))
    checkpoints.drain()
    checkpoints.raise_failure()


def steps(root: PathLike) -> list[int]:
    """Steps of the intact checkpoints, the newest first."""
    return [found.commit.step for found in scan(root) if found.commit is not None and not found.problem]


def check_pure(root: PathLike) -> list[int]:
    """Check that every discoverable checkpoint is intact and holds values of its own step only; return the steps."""
    for found in scan(root):
        if found.problem:
            continue
        assert found.commit is not None
        assert verify(found.path) == ""
        for slot in found.commit.slots:
            folder = TensorDirectory(found.path / slot)
            assert len(folder) == 5, list(folder)
            for key in folder:
                values = folder.read(key)
                assert (values == found.commit.step).all(), (found.path.name, key, values)
        for rank in range(len(found.commit.ranks)):
            extra = load_plain(found.path / extra_file(rank))
            assert extra == {"step": found.commit.step, "rank": rank}
    return steps(root)


def leftovers(root: PathLike) -> list[str]:
    """Names of what is no checkpoint and no file about all of them."""
    folder = as_folder(root)
    found = {one.path.name for one in scan(root)}
    return names_in(folder / STAGING) + [name for name in names_in(folder) if parse_name(name) and name not in found]


def put(address: Any, content: bytes | dict[str, Any]) -> None:
    """Write an object, past the door that the package writes through."""
    address.system.pipe_file(address.path, content if isinstance(content, bytes) else json.dumps(content).encode())


def owners_note(**other: Any) -> dict[str, Any]:
    """What a note says of its owner."""
    return {**json.loads(owner_note()), **other}


#: No such process.
GONE = {"pid": 2**22 + 1}


class KillingFileSystem(FileSystem):
    """Counts operations, and kills the process before one of them."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.count = 0

    def before(self, operation: str, path: Path) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


class FailingFileSystem(FileSystem):
    """Raises an error before operations on matching paths, as long as it is told to."""

    def __init__(self, error: BaseException, part: str, operation: str = "write") -> None:
        self.error = error
        self.part = part
        self.operation = operation
        self.active = True

    def before(self, operation: str, path: Path) -> None:
        if self.active and operation == self.operation and self.part in str(path):
            raise self.error
