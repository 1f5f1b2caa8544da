"""Reads DCP directories without running code, onto any number of ranks.

The metadata of a DCP directory is a pickle, and torch's own reader runs whatever it holds, before any check. Here it
goes through an unpickler that knows a dozen harmless classes and refuses the rest, and each tensor through torch's
weights-only loader. Packed tensors are found through the index beside the metadata.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_longctx.checkpoint.address import Folder, range_reader
from lightning_longctx.checkpoint.layout import METADATA, PACKED_INDEX
from lightning_longctx.errors import CheckpointError
from lightning_longctx.units import counted

__all__ = ["SavedTensor", "TensorDirectory"]

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    packed_at: int | None = None  # where it begins in a flat buffer, in elements


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as it was saved.

    Attributes:
        size: of the whole tensor.
        dtype: of its values.
        chunks: its parts, and where they are.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]


class TensorDirectory(Mapping[str, SavedTensor]):
    """The tensors of a DCP directory, by name.

    Args:
        folder: the directory; its checksums were compared already if it has some.
        trust_pickle: let the metadata be any pickle, with whatever code it runs.
        foreign: it was not written by this package, and may hold values that are no tensors.

    Raises:
        CheckpointError: metadata that is missing, damaged, or holds something that could run code; entries that are no
            tensors in a directory of this package.
    """

    def __init__(self, folder: Folder, trust_pickle: bool = False, foreign: bool = False) -> None:
        self.folder = folder
        metadata = _read_metadata(folder / METADATA, trust_pickle)
        self._entries = _entries(metadata, folder)
        self._values = _values(metadata, folder)
        if self._values and not foreign:
            raise CheckpointError(str(folder), "must hold tensors only", sorted(self._values)[:8], _DAMAGED)
        self.aliases: dict[str, str] = {}
        if (folder / PACKED_INDEX).is_file():
            self._add_index(json.loads((folder / PACKED_INDEX).read_text()))

    def __getitem__(self, key: str) -> SavedTensor:
        return self._entries[self.aliases.get(key, key)]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._entries, *self.aliases])

    def __len__(self) -> int:
        return len(self._entries) + len(self.aliases)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, each rank the part that it holds. No rank waits for another.

        Args:
            targets: DTensors of any layout, or whole tensors, on any device; sizes as saved.

        Raises:
            CheckpointError: a name that was not saved, or another size.
        """
        places = {key: _local_box(target) for key, target in targets.items()}
        work: dict[str, dict[int, list[tuple[_Chunk, _Box]]]] = {}
        for key, target in targets.items():
            for chunk in self._chunks(key, target):
                if _overlap(chunk.offsets, chunk.sizes, *places[key][1:]) is not None:
                    work.setdefault(chunk.file, {}).setdefault(chunk.start, []).append((chunk, places[key]))
        for name, reads in work.items():
            self._read_file(self.folder / name, reads)

    @staticmethod
    def _read_file(path: Folder, reads: Mapping[int, list[tuple[_Chunk, _Box]]]) -> None:
        with _reader(path) as read:
            for start, wanted in sorted(reads.items()):
                stored = cast(Tensor, _read_safely(read, start, wanted[0][0].length, path))
                for chunk, place in wanted:
                    _copy(stored, chunk, place)

    def read(self, key: str) -> Tensor:
        """One whole tensor, on the CPU."""
        saved = self._require(key)
        target = torch.empty(saved.size, dtype=saved.dtype)
        self.read_into({key: target})
        return target

    def values_below(self, prefix: str) -> dict[str, Any]:
        """Values of a foreign directory that are no tensors, by the rest of their name: numbers and plain containers.

        Raises:
            CheckpointError: one that could only be read by running code.
        """
        found = {}
        for key, (name, start, length) in self._values.items():
            if key.startswith(prefix):
                with _reader(self.folder / name) as read:
                    found[key.removeprefix(prefix)] = _read_safely(read, start, length, self.folder / name)
        return found

    def _require(self, key: str) -> SavedTensor:
        if key not in self:
            got = f"{counted(len(self), 'other')}, such as {next(iter(self), None)!r}"
            fix = "Load it into the model that it was saved from, or rename what differs."
            raise CheckpointError(key, f"must be in {self.folder}", got, fix)
        return self[key]

    def _chunks(self, key: str, target: Tensor) -> tuple[_Chunk, ...]:
        saved = self._require(key)
        if tuple(target.shape) != saved.size:
            fix = "Build the model as it was when this was saved."
            raise CheckpointError(key, f"must have the saved size {saved.size}", tuple(target.shape), fix)
        return saved.chunks

    def _add_index(self, index: Mapping[str, Any]) -> None:
        names = {item["stored"] for item in index["packed"]}
        stored = {name: self._entries.pop(name, None) for name in names}
        found: dict[str, list[_Chunk]] = {}
        for item in index["packed"]:
            buffer = stored[item["stored"]]
            if buffer is None:
                raise CheckpointError(str(self.folder), "must hold its packed tensors", item["stored"], _DAMAGED)
            (place,) = buffer.chunks
            sizes, offsets = tuple(item["sizes"]), tuple(item["offsets"])
            chunk = _Chunk(offsets, sizes, place.file, place.start, place.length, int(item["start"]))
            found.setdefault(item["key"], []).append(chunk)
            self._entries[item["key"]] = SavedTensor(tuple(item["size"]), buffer.dtype, tuple(found[item["key"]]))
        self.aliases = {str(alias): str(key) for alias, key in index["aliases"].items()}


_DAMAGED = "Use another checkpoint."


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name) if name in _ALLOWED.get(module, ()) else None
        if value is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            value = getattr(torch, name)
        if value is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return value


def _read_metadata(path: Folder, trust_pickle: bool) -> Metadata:
    fix = "Use another checkpoint; `trust_pickle` loads it if you trust whoever wrote it."
    try:
        with io.BytesIO(path.read_bytes()) as file:
            metadata = pickle.load(file) if trust_pickle else _AllowListUnpickler(file).load()  # noqa: S301 - asked for
    except OSError as error:
        raise CheckpointError(str(path), "must be readable", error.strerror, _DAMAGED) from error
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(str(path), "must describe tensors and nothing else", error, fix) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(str(path), "must be DCP metadata", type(metadata).__name__, fix)
    return metadata


def _entries(metadata: Metadata, folder: Folder) -> dict[str, SavedTensor]:
    entries = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        chunks = []
        for number, chunk in enumerate(entry.chunks):
            place = _place(metadata.storage_data[MetadataIndex(key, chunk.offsets, number)], folder)
            chunks.append(_Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        entries[key] = SavedTensor(tuple(entry.size), entry.properties.dtype, tuple(chunks))
    return entries


def _values(metadata: Metadata, folder: Folder) -> dict[str, tuple[str, int, int]]:
    """Where values that are no tensors are."""
    others = [
        key for key, entry in metadata.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)
    ]
    return {key: _place(metadata.storage_data[MetadataIndex(key)], folder) for key in others}


def _place(info: Any, folder: Folder) -> tuple[str, int, int]:
    if PurePath(info.relative_path).name != info.relative_path:
        raise CheckpointError(str(folder), "must name files of its own", info.relative_path, _DAMAGED)
    return info.relative_path, int(info.offset), int(info.length)


@contextmanager
def _reader(path: Folder) -> Iterator[Callable[[int, int], bytes]]:
    try:
        with range_reader(path) as read:
            yield read
    except OSError as error:
        raise CheckpointError(str(path), "must be readable", error.strerror, _DAMAGED) from error


def _read_safely(read: Callable[[int, int], bytes], start: int, length: int, path: Folder) -> Any:
    content = io.BytesIO(read(start, start + length))
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(str(path), f"must hold plain data at byte {start}", error, _DAMAGED) from error


_Box = tuple[Tensor, tuple[int, ...], tuple[int, ...]]


def _local_box(target: Tensor) -> _Box:
    """This rank's part of a tensor, and where it is in the whole."""
    if not isinstance(target, DTensor):
        return target.detach(), (0,) * target.dim(), tuple(target.shape)
    sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return target.to_local().detach(), tuple(offsets), tuple(sizes)


def _overlap(
    first: tuple[int, ...], first_sizes: tuple[int, ...], second: tuple[int, ...], second_sizes: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """Begin and end along each dim of what two boxes share; None if that is nothing."""
    shared = [
        (max(a, b), min(a + n, b + m)) for a, n, b, m in zip(first, first_sizes, second, second_sizes, strict=True)
    ]
    return shared if all(begin < end for begin, end in shared) else None


def _copy(stored: Tensor, chunk: _Chunk, target: _Box) -> None:
    local, offsets, sizes = target
    shared = _overlap(chunk.offsets, chunk.sizes, offsets, sizes)
    assert shared is not None
    if chunk.packed_at is not None:
        stored = stored.narrow(0, chunk.packed_at, prod(chunk.sizes)).view(chunk.sizes)
    for dim, (begin, end) in enumerate(shared):
        stored = stored.narrow(dim, begin - chunk.offsets[dim], end - begin)
        local = local.narrow(dim, begin - offsets[dim], end - begin)
    with torch.no_grad():
        local.copy_(stored)
