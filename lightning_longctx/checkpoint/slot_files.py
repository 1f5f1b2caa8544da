"""A slot's files: one data file for each rank, then the DCP metadata and the index of packed tensors, by rank 0.

The format is that of ``torch.distributed.checkpoint`` and its readers can open it; the way to it is not. Its own save
pickles exceptions between ranks (one that cannot be pickled makes the others wait for the time limit), loses errors of
writer threads, and plans each tensor anew.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import METADATA, PACKED_INDEX
from lightning_longctx.checkpoint.staging import Piece, StagedTensors
from lightning_longctx.errors import CheckpointError
from lightning_longctx.units import counted

__all__ = ["SlotIndex", "write_rank_file"]


def write_rank_file(filesystem: FileSystem, folder: Folder, rank: int, staged: StagedTensors) -> dict[str, Any]:
    """Write one rank's tensors of a slot.

    Args:
        filesystem: what to write through.
        folder: the slot's directory.
        rank: this rank.
        staged: what to write.

    Returns:
        As plain values, for rank 0: ``file``, its ``facts``, ``tensors`` with their place in it, and the ``plan``.
    """
    name = f"__{rank}_0.distcp"
    filesystem.make_directory(folder)
    tensors = []
    with filesystem.create(folder / name) as stream:
        for key, tensor in staged.tensors.items():
            start = stream.tell()
            torch.save(tensor, cast(Any, stream))
            place = {"start": start, "length": stream.tell() - start}
            tensors.append({"key": key, "dtype": str(tensor.dtype), "sizes": list(tensor.shape), **place})
    return {
        "file": name,
        "facts": {"size": stream.size, "crc32": stream.crc32},
        "tensors": tensors,
        "plan": staged.plan,
    }


class SlotIndex:
    """Makes the files that turn the ranks' files into a slot, anew only if something has changed."""

    def __init__(self) -> None:
        self._made_from: list[Any] = []
        self._files: dict[str, bytes] = {}

    def files(self, results: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        """The files by name: ``packed.json``, and ``.metadata``, which belongs last.

        Args:
            results: what :func:`write_rank_file` returned, of all ranks.

        Raises:
            CheckpointError: a tensor is not covered, or covered twice, by what ranks wrote; names it.
        """
        source = [(result["file"], result["tensors"], result["plan"]) for result in results]
        if source != self._made_from:
            self._files = _index_files(results)
            self._made_from = source
        return self._files


def _index_files(results: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    plans = [json.loads(result["plan"]) for result in results]
    pieces = [[Piece(**_tuples(piece)) for piece in plan["pieces"]] for plan in plans]
    every = [piece for of_rank in pieces for piece in of_rank]
    _check_complete(every)
    index = {
        "packed": [vars(piece) for piece in every if piece.stored != piece.key],
        "aliases": {alias: key for plan in plans for alias, key in plan["aliases"].items()},
    }
    metadata = _metadata(results, [{piece.key: piece for piece in of_rank} for of_rank in pieces])
    return {PACKED_INDEX: json.dumps(index).encode(), METADATA: pickle.dumps(metadata)}


def _metadata(results: Sequence[Mapping[str, Any]], pieces: Sequence[Mapping[str, Piece]]) -> Metadata:
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for result, own_pieces in zip(results, pieces, strict=True):
        for item in result["tensors"]:
            key, sizes = item["key"], tuple(item["sizes"])
            own = own_pieces.get(key)  # None: a flat buffer
            size, offsets = (own.size, own.offsets) if own else (sizes, (0,) * len(sizes))
            properties = TensorProperties(dtype=getattr(torch, item["dtype"].removeprefix("torch.")))
            entry = entries.setdefault(key, TensorStorageMetadata(properties, torch.Size(size), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = _StorageInfo(result["file"], item["start"], item["length"])
            storage[MetadataIndex(key, offsets, len(entry.chunks) - 1)] = place
    return Metadata(
        state_dict_metadata=dict(entries),
        planner_data={key: (key,) for key in entries},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _check_complete(pieces: Iterable[Piece]) -> None:
    size: dict[str, tuple[int, ...]] = {}
    count: dict[str, int] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for piece in pieces:
        values = prod(piece.sizes)
        if size.setdefault(piece.key, piece.size) != piece.size or (values and (piece.key, piece.offsets) in seen):
            fix = "Every rank must have the same names and sizes; look at which ranks differ."
            got = f"{piece.sizes} at {piece.offsets} of {piece.size} beside another of {size[piece.key]}"
            raise CheckpointError(piece.key, "must be written once, with one size", got, fix)
        seen.add((piece.key, piece.offsets))
        count[piece.key] = count.get(piece.key, 0) + values
    for key, whole in size.items():
        if count[key] != prod(whole):
            fix = "A rank wrote less than its part; every rank must have the same names and layout."
            raise CheckpointError(key, "must be written whole", f"{count[key]} of {counted(prod(whole), 'value')}", fix)


def _tuples(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in piece.items()}
