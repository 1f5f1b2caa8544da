"""Sums of what the readers counted, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_longctx.datamodules.row_state import packed_of
from lightning_longctx.topology import Topology

__all__ = ["mix_over_ranks", "sum_over_ranks"]


def sum_over_ranks(values: Sequence[int], topology: Topology) -> list[int]:
    """Sums over the readers, with one reduction, which every rank must take part in.

    Args:
        values: of this rank; those of ranks that read nothing do not count.
        topology: ranks and groups.
    """
    total = torch.tensor(list(values), dtype=torch.int64)
    if not topology.is_reader:
        total.zero_()
    if topology.host_group is not None:
        dist.all_reduce(total, group=topology.host_group)
    return [int(value) for value in total.tolist()]


def mix_over_ranks(counters: Mapping[str, int], names: Sequence[str], topology: Topology) -> dict[str, float]:
    """Share of each source of the packed tokens, with one reduction; empty before the first row.

    Args:
        counters: of this rank.
        names: of the sources.
        topology: ranks and groups.
    """
    tokens = sum_over_ranks([counters.get(packed_of(name), 0) for name in names], topology)
    total = sum(tokens)
    return {name: count / total for name, count in zip(names, tokens, strict=True)} if total else {}
