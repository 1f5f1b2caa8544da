"""Random layouts and rows for the comparison, from a seed: the same on every rank and machine.

A layout is who shares what: processes, ranks of a row, accumulation, document lengths, and which targets are ignored.
Lengths and ignored targets are drawn to be unkind: documents of one token, documents across every border of a shard,
shards and whole rows without a target.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID, PackedBatch

__all__ = ["Group", "RowPlan", "build_row", "document_rows", "draw_groups"]

# Each accumulation once before any comes again: windows of one, of two and of an odd number of micro-batches.
_ACCUMULATIONS = (1, 2, 3)


@dataclass(frozen=True)
class RowPlan:
    """One packed row.

    Attributes:
        lengths: of the documents; what is missing to ``tokens`` is one document of padding.
        tokens: of the row.
        ignored: first token without a target, and the first one behind them that has one again.
        seed: of the token ids.
    """

    lengths: tuple[int, ...]
    tokens: int
    ignored: tuple[int, int]
    seed: int


@dataclass(frozen=True)
class Group:
    """Layouts that one fit runs through: a step each, with a learning rate of 0.

    Attributes:
        world_size: processes.
        sp_size: ranks of a row.
        accumulate: micro-batches of a step.
        steps: the rows of each step; data-parallel rank r takes rows r, r + dp, ...
    """

    world_size: int
    sp_size: int
    accumulate: int
    steps: tuple[tuple[RowPlan, ...], ...]

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.sp_size


def draw_groups(
    sizes: Iterable[tuple[int, int]], layouts: int, seed: int, row_tokens: int = 48, fits: int = 1
) -> list[Group]:
    """Draw layouts, spread evenly over pairs of world and sequence-parallel size.

    Args:
        sizes: pairs of processes and ranks of a row.
        layouts: at least so many in all; rounded up to the same number for each fit.
        seed: of everything that is drawn.
        row_tokens: tokens of a row; every sequence-parallel size divides it.
        fits: of each pair, with different accumulation.

    Example:
        >>> groups = draw_groups([(1, 1), (4, 2)], 6, seed=0)
        >>> [(group.dp_size, group.sp_size, len(group.steps)) for group in groups]
        [(1, 1, 3), (2, 2, 3)]
    """
    chance = random.Random(seed)  # noqa: S311  (cases of a test, no secrets)
    pairs = [pair for pair in sizes for _ in range(fits)]
    steps = -(-layouts // len(pairs))
    groups = []
    for number, (world_size, sp_size) in enumerate(pairs):
        accumulate = _ACCUMULATIONS[(number + seed) % len(_ACCUMULATIONS)]
        rows = world_size // sp_size * accumulate
        drawn = tuple(
            tuple(_draw_row(chance, row_tokens, may_ignore=row > 0) for row in range(rows)) for _ in range(steps)
        )
        groups.append(Group(world_size, sp_size, accumulate, drawn))
    return groups


def _draw_row(chance: random.Random, tokens: int, may_ignore: bool) -> RowPlan:
    longest = chance.choice([3, tokens // 4, tokens // 2, tokens])
    lengths: list[int] = []
    filled = tokens - chance.choice([0, 0, 1, tokens // 3])
    while sum(lengths) < filled:
        lengths.append(min(chance.randint(1, longest), filled - sum(lengths)))
    if max(lengths) < 2 or (longest == tokens and chance.random() < 0.5):  # single tokens have no target
        lengths = [filled]
    half = tokens // 2
    start = chance.randint(0, tokens - 1)
    ranges = [(0, 0), (0, half), (half, tokens), (start, chance.randint(start, tokens))]
    ignored = chance.choice([*ranges, (0, tokens)]) if may_ignore else (0, 0)
    return RowPlan(tuple(lengths), tokens, ignored, chance.randint(0, 2**31))


def build_row(plan: RowPlan, vocabulary: int) -> PackedBatch:
    """Build the packed batch of a plan, token by token and apart from the code that packs for training.

    Args:
        plan: the row.
        vocabulary: token ids are below it.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    bounds = [0]
    for number, length in enumerate(plan.lengths):
        document = torch.randint(vocabulary, (length,), generator=generator).tolist()
        ids += document
        labels += [*document[1:], IGNORE_INDEX]
        positions += range(length)
        sources += [number % 2] * length
        bounds.append(len(ids))
    padding = plan.tokens - len(ids)
    if padding:
        bounds.append(plan.tokens)
    columns = {
        "input_ids": ids + [0] * padding,
        "shift_labels": labels + [IGNORE_INDEX] * padding,
        "position_ids": [*positions, *range(padding)],
        "source_ids": sources + [PAD_SOURCE_ID] * padding,
    }
    tensors: dict[str, Any] = {name: torch.tensor([column]) for name, column in columns.items()}
    tensors["shift_labels"][0, slice(*plan.ignored)] = IGNORE_INDEX
    keys = [[number % 2, number] for number in range(len(plan.lengths))] + [[-1, -1]] * bool(padding)
    row: Any = {
        **tensors,
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "max_seqlen": max(b - a for a, b in zip(bounds, bounds[1:], strict=False)),
        "document_keys": torch.tensor(keys),
        "loss_divisor": plan.tokens,
    }
    built: PackedBatch = row
    return built


def document_rows(row: PackedBatch) -> list[PackedBatch]:
    """Cut a row into one row for each document, padding included: nothing is packed in these."""
    bounds = row["cu_seqlens"].tolist()
    return [_one_document(row, number, slice(*pair)) for number, pair in enumerate(_pairs(bounds))]


def _one_document(row: PackedBatch, number: int, part: slice) -> PackedBatch:
    length = part.stop - part.start

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, part].clone()

    return {
        "input_ids": cut(row["input_ids"]),
        "shift_labels": cut(row["shift_labels"]),
        "position_ids": cut(row["position_ids"]),
        "source_ids": cut(row["source_ids"]),
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
        "max_seqlen": length,
        "document_keys": row["document_keys"][number : number + 1],
        "loss_divisor": row["loss_divisor"],
    }


def _pairs(bounds: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(bounds, bounds[1:], strict=False)
