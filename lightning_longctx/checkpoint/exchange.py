"""Small exchanges between ranks as JSON text: nothing is pickled, so an odd exception can hang nobody."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_json", "broadcast_json", "gather_json"]

Group = dist.ProcessGroup | None


def all_gather_json(value: Any, group: Group) -> list[Any]:
    """Everybody's value on every rank, by rank. The group needs a CPU backend."""
    if group is None:
        return [value]
    own, sizes = _sized(value, group)
    texts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(texts, own, group=group)
    return [_decode(text, size) for text, size in zip(texts, sizes, strict=True)]


def gather_json(value: Any, group: Group) -> list[Any] | None:
    """Everybody's value on the group's first rank, by rank; None elsewhere."""
    if group is None:
        return [value]
    own, sizes = _sized(value, group)
    first = dist.get_rank(group) == 0
    texts = [torch.empty_like(own) for _ in sizes] if first else None
    dist.gather(own, texts, group=group, group_dst=0)
    return None if texts is None else [_decode(text, size) for text, size in zip(texts, sizes, strict=True)]


def broadcast_json(value: Any, group: Group) -> Any:
    """The value of the group's first rank."""
    if group is None:
        return value
    own = _encode(value)
    size = torch.tensor([own.numel()])
    dist.broadcast(size, group=group, group_src=0)
    text = own if dist.get_rank(group) == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=0)
    return _decode(text, int(size))


def _sized(value: Any, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """The value as text, padded to the longest of the group, and the length of each."""
    own = _encode(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([own.numel()]), group=group)
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: own.numel()] = own
    return padded, sizes


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor, size: int) -> Any:
    return json.loads(text[:size].numpy().tobytes())
