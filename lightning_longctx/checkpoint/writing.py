"""A slot's files: one data file for each rank, then the DCP metadata and the index of packed tensors, by rank 0.

The format is that of ``torch.distributed.checkpoint`` and its readers can open it; the way to it is not. Its own save
pickles exceptions between ranks (one that cannot be pickled makes the others wait for the time limit), loses errors of
writer threads, and plans each tensor anew.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
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

from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import METADATA, PACKED_INDEX
from lightning_longctx.checkpoint.staging import Piece, StagedTensors
from lightning_longctx.errors import CheckpointError

__all__ = ["slot_index", "write_rank_file"]


def write_rank_file(filesystem: FileSystem, folder: Path, rank: int, staged: StagedTensors) -> dict[str, Any]:
    """Write one rank's tensors of a slot.

    Args:
        filesystem: what to write through.
        folder: the slot's directory.
        rank: this rank.
        staged: what to write.

    Returns:
        As plain values, for rank 0: ``file``, its ``facts``, ``tensors`` with their place in it, ``pieces`` and
        ``aliases``.
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
        "pieces": [asdict(piece) for piece in staged.pieces],
        "aliases": dict(staged.aliases),
    }


def slot_index(results: Sequence[Mapping[str, Any]], checkpoint_id: str) -> dict[str, bytes]:
    """The files that make the ranks' files a slot.

    Args:
        results: what :func:`write_rank_file` returned, of all ranks.
        checkpoint_id: name for the metadata.

    Returns:
        Content by file name: ``packed.json``, and ``.metadata``, which belongs last.

    Raises:
        CheckpointError: a tensor is not covered, or covered twice, by what ranks wrote; names it.
    """
    pieces = [Piece(**_tuples(piece)) for result in results for piece in result["pieces"]]
    _check_complete(pieces)
    aliases = {alias: key for result in results for alias, key in result["aliases"].items()}
    packed = [
        {"key": p.key, "size": p.size, "offsets": p.offsets, "sizes": p.sizes, "stored": p.stored, "start": p.start}
        for p in pieces
        if p.stored != p.key
    ]
    index = {"packed": packed, "aliases": aliases}
    metadata = _metadata(results, checkpoint_id)
    return {PACKED_INDEX: json.dumps(index).encode(), METADATA: pickle.dumps(metadata)}


def _metadata(results: Sequence[Mapping[str, Any]], checkpoint_id: str) -> Metadata:
    entries: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for result in results:
        pieces = {piece["key"]: piece for piece in result["pieces"]}
        for item in result["tensors"]:
            key, sizes = item["key"], tuple(item["sizes"])
            own = pieces.get(key)  # None: a flat buffer
            size = tuple(own["size"]) if own else sizes
            offsets = tuple(own["offsets"]) if own else (0,) * len(sizes)
            properties = TensorProperties(dtype=getattr(torch, item["dtype"].removeprefix("torch.")))
            entry = entries.setdefault(key, TensorStorageMetadata(properties, torch.Size(size), []))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            place = _StorageInfo(result["file"], item["start"], item["length"])
            storage[MetadataIndex(key, offsets, len(entry.chunks) - 1)] = place
    return Metadata(
        state_dict_metadata=dict(entries),
        planner_data={key: (key,) for key in entries},
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id),
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
            raise CheckpointError(key, "must be written whole", f"{count[key]} of {prod(whole)} values", fix)


def _tuples(piece: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in piece.items()}
