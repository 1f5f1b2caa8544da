"""``run-<id>.wandb``, which W&B keeps of each run, online or offline.

Its releases of today have no Python code that reads it: a log as of LevelDB, blocks of 32 KiB with pieces of (checksum,
length, kind, bytes). What is in a record, the package knows.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.report.logs.columns import Columns
from lightning_longctx.tools.report.series import Series

__all__ = ["files_in", "is_newest", "read"]

_BLOCK = 2**15
_HEADER = struct.Struct("<IHB")
_MAGIC, _START = b":W&B", 7  # the first block begins with seven bytes that are no piece
_FIRST, _LAST, _WHOLE = 2, 4, 1
_FIX = "Give the directory of a run that W&B wrote."
_STEP = "trainer/global_step"  # Lightning's own; `_step` counts calls


def files_in(path: Path) -> list[Path]:
    """The file of a run's directory and those of the same run's other starts beside it, the oldest first."""
    own = next(iter(sorted(path.resolve().glob("run-*.wandb"))), None)
    if own is None:
        return []
    return sorted({own, *own.parent.parent.glob(f"*run-*/{escape(own.name)}")}, key=_started)


def is_newest(path: Path) -> bool:
    """Whether none of the runs beside this one was started later."""
    own = files_in(path)
    return max([*own, *path.resolve().parent.glob("*run-*/run-*.wandb")], key=_started).name == own[0].name


def read(files: Sequence[Path]) -> dict[str, Series]:
    """Read the history by Lightning's step.

    A record that is still being written is left out.

    Args:
        files: the oldest first.

    Returns:
        By key; empty without a value yet.

    Raises:
        ConfigurationError: no package ``wandb``, or a file of another form.
    """
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        fix = "Run `pip install 'lightning-longctx[wandb]'`, or use CSVLogger, which needs nothing."
        got = f"no such package ({error})"
        raise ConfigurationError(str(files[0]), "needs the package wandb", got, fix) from error
    found = Columns()
    for file in files:
        try:
            for data in _records(file):
                _add(found, Record.FromString(data).history)
        except (ValueError, OverflowError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(str(file), "must be a file of W&B", str(error), _FIX) from error
    return found.series()


def _add(found: Columns, history: Any) -> None:
    items: dict[str, Any] = {}
    for item in history.item:
        place = tuple(item.nested_key) or (item.key,)
        if len(place) == 1:  # pictures and tables are told by several places
            items[place[0]] = json.loads(item.value_json)
    step = next((items[key] for key in (_STEP, "_step") if isinstance(items.get(key), int)), history.step.num)
    for key, value in items.items():
        if isinstance(value, (int, float, str)) and not key.startswith("_"):  # a NaN may be in quotes
            found.add(key, [step], [value])


def _records(path: Path) -> Iterator[bytes]:
    """The records, until one that is not whole."""
    record = b""
    for kind, data in _pieces(path):
        record = data if kind in (_WHOLE, _FIRST) else record + data
        if kind in (_WHOLE, _LAST):
            yield record


def _pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """Kind and bytes, until a piece that is not whole."""
    place = _START
    for block in _blocks(path):
        while place + _HEADER.size <= len(block):
            checksum, length, kind = _HEADER.unpack_from(block, place)
            piece = block[place + _HEADER.size - 1 : place + _HEADER.size + length]  # the kind is summed too
            if zlib.crc32(piece) != checksum:
                return
            yield kind, piece[1:]
            place += _HEADER.size + length
        place = 0


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        block = file.read(_BLOCK)
        if not block.startswith(_MAGIC[: len(block)]):
            raise ConfigurationError(str(path), "must be a file of W&B", f"one that begins with {block[:4]!r}", _FIX)
        while block:
            yield block
            block = file.read(_BLOCK)


def _started(file: Path) -> str:
    """When: the directory is ``[offline-]run-<date>_<time>-<id>``."""
    return file.parent.name.partition("run-")[2]
