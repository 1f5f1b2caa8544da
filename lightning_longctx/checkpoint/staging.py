"""Persistent host copies of a slot's tensors: training waits for this copy and for nothing else.

The buffers are allocated and touched once, since first-touch memory is several times slower than warm. Small tensors
of one kind share one flat buffer, so that thousands of them are written like one. Which rank writes what follows from
the layout alone, so no rank has to ask another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_longctx.errors import CheckpointError

__all__ = ["PACK_BELOW", "Piece", "StagedTensors", "StagingBuffers"]

#: Bytes of a shard below which a tensor is packed. Writing a tensor costs about 0.3 ms of Python: at 64 KiB that is as
#: long as the disk takes.
PACK_BELOW = 64 * 1024


@dataclass(frozen=True)
class Piece:
    """This rank's part of one tensor.

    Attributes:
        key: name of the tensor.
        size: of the whole tensor.
        offsets: where the part begins in it.
        sizes: of the part.
        stored: name of the tensor that is written: ``key``, or that of a flat buffer.
        start: where the part begins in the flat buffer, in elements.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: str
    start: int = 0


@dataclass(frozen=True)
class StagedTensors:
    """What one rank writes of one slot.

    Attributes:
        tensors: host copies by stored name, each with a storage of its own.
        pieces: which part of which tensor each one holds.
        aliases: further names of a tensor (tied weights), each with the name that it is stored under.
        plan: ``pieces`` and ``aliases`` as JSON, made once: thousands of them would cost each write a pause of the
            interpreter.
    """

    tensors: Mapping[str, Tensor]
    pieces: Sequence[Piece]
    aliases: Mapping[str, str]
    plan: str = ""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class StagingBuffers:
    """The buffers of one slot on one rank.

    Args:
        rank: this rank.
        world_size: number of ranks, for dealing out tensors that every rank has whole.
        pin: allocate page-locked memory. Default False: needs CUDA.
        pack_below: bytes of a shard below which a tensor is packed.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, pin: bool = False, pack_below: int = PACK_BELOW) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pin = pin
        self._pack_below = pack_below
        self._keys: list[str] | None = None
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._sources: list[str] = []
        self._targets: list[Tensor] = []
        self._staged = StagedTensors({}, [], {})

    @property
    def size(self) -> int:
        """Bytes allocated."""
        return self._staged.size

    def renewed(self) -> StagingBuffers:
        """Buffers like these, not allocated yet."""
        return StagingBuffers(self._rank, self._world_size, self._pin, self._pack_below)

    def prepare(self, state: Mapping[str, Tensor], tied: bool = True) -> None:
        """Allocate and touch the buffers for tensors of these names, sizes and layouts. Nothing happens if they fit.

        Args:
            state: tensors by name.
            tied: store names that share one memory once. Default True; False where tensors only stand for others of
                their size.

        Raises:
            CheckpointError: a tensor that cannot be stored (no dense one).
        """
        shapes = [(tensor.shape, tensor.dtype) for tensor in state.values()]
        if list(state) == self._keys and shapes == self._shapes and self._still_tied(state):
            return
        for key, tensor in state.items():
            _check_dense(key, tensor)
        aliases = _aliases(state) if tied else {}
        self._keys, self._staged = [], StagedTensors({}, [], {})  # free the old ones before the new ones come
        own = {key: tensor for key, tensor in state.items() if key not in aliases}
        writers = _writers(own, self._world_size, self._pack_below)
        mine = {key: tensor for key, tensor in own.items() if self._writes(tensor, writers.get(key))}
        pieces = _plan(mine, self._rank, self._pack_below)
        plan = json.dumps({"pieces": [vars(piece) for piece in pieces], "aliases": aliases})
        self._staged = StagedTensors(self._allocate(mine, pieces), pieces, aliases, plan)
        self._sources = [piece.key for piece in pieces]
        self._targets = [_view(self._staged.tensors[piece.stored], piece) for piece in pieces]
        self._keys, self._shapes = list(state), shapes

    def stage(self, state: Mapping[str, Tensor]) -> StagedTensors:
        """Copy this rank's part of a state into the buffers. They must not be in use any more.

        Args:
            state: tensors by name, the same names on every rank: DTensors, or tensors that every rank has whole.

        Returns:
            The copies. They change with the next call.
        """
        self.prepare(state)
        sources = [_local(state[key]) for key in self._sources]
        with torch.no_grad():
            if sources:  # one call for all: with thousands of small ones the calls would be the pause
                torch._foreach_copy_(self._targets, sources, non_blocking=self._pin)
        if any(source.is_cuda for source in sources):
            torch.cuda.synchronize()
        return self._staged

    def _still_tied(self, state: Mapping[str, Tensor]) -> bool:
        aliases = self._staged.aliases.items()
        return all(_local(state[alias]).data_ptr() == _local(state[key]).data_ptr() for alias, key in aliases)

    def _writes(self, tensor: Tensor, writer: int | None) -> bool:
        if not isinstance(tensor, DTensor):
            return writer == self._rank
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or not _local(tensor).numel():
            return False
        # Copies of one shard are written once, by the first of the ranks that hold it.
        return all(
            isinstance(placement, Shard) or place == 0
            for placement, place in zip(tensor.placements, coordinate, strict=True)
        )

    def _allocate(self, state: Mapping[str, Tensor], pieces: Sequence[Piece]) -> dict[str, Tensor]:
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for piece in pieces:
            shape = piece.sizes if piece.stored == piece.key else (piece.start + prod(piece.sizes),)
            shapes[piece.stored] = (shape, state[piece.key].dtype)
        # `zeros` alone would leave pages untouched until the first copy.
        return {
            name: torch.empty(shape, dtype=dtype, pin_memory=self._pin).zero_()
            for name, (shape, dtype) in shapes.items()
        }


def _plan(state: Mapping[str, Tensor], rank: int, pack_below: int) -> list[Piece]:
    pieces, filled = [], dict[str, int]()
    for key, tensor in state.items():
        sizes, offsets = _place(tensor)
        count = prod(sizes)
        if _shard_bytes(tensor) >= pack_below:
            pieces.append(Piece(key, tuple(tensor.shape), offsets, sizes, key))
            continue
        stored = f"packed.{rank:05d}.{str(tensor.dtype).removeprefix('torch.')}"
        start = filled.get(stored, 0)
        pieces.append(Piece(key, tuple(tensor.shape), offsets, sizes, stored, start))
        filled[stored] = start + count
    return pieces


def _place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of this rank's part."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(sizes), tuple(offsets)


def _shard_bytes(tensor: Tensor) -> int:
    """Bytes of a shard, the same number on every rank, so that ranks agree what is packed."""
    shards = 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        shards = prod(mesh.size(dim) for dim, kind in enumerate(tensor.placements) if isinstance(kind, Shard))
    return tensor.numel() * tensor.element_size() // shards


def _writers(state: Mapping[str, Tensor], world_size: int, pack_below: int) -> dict[str, int]:
    """Which rank writes each tensor that all have whole, on every rank alike.

    Large ones go to the rank with the fewest bytes so far, small ones to the first: among them are statistics that
    ranks do not share, such as those of batch normalization, which should at least come from one rank.
    """
    loads, writers = [0] * world_size, {}
    for key, tensor in state.items():
        if isinstance(tensor, DTensor):
            continue
        small = tensor.nbytes < pack_below
        writers[key] = 0 if small else min(range(world_size), key=loads.__getitem__)
        loads[writers[key]] += tensor.nbytes
    return writers


def _aliases(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are stored under another name already."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for key, tensor in state.items():
        local = _local(tensor)
        place: tuple[object, ...] = (
            local.device,
            local.data_ptr(),
            tuple(local.shape),
            local.stride(),
            tuple(tensor.shape),
            local.dtype,
        )
        if not local.numel():
            place = (id(tensor),)  # empty tensors share no memory
        if place in first:
            found[key] = first[place]
        first.setdefault(place, key)
    return found


def _check_dense(key: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "a meta tensor" if tensor.is_meta else f"{type(tensor).__name__}, layout {tensor.layout}"
        raise CheckpointError(key, "must be a dense tensor", kind, "Leave it out of the state, or store it dense.")


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _view(stored: Tensor, piece: Piece) -> Tensor:
    if piece.stored == piece.key:
        return stored
    return stored.narrow(0, piece.start, prod(piece.sizes)).view(piece.sizes)
