"""Rows with several sources, and the loss of each source by a plain loop over tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lightning_longctx.batch import IGNORE_INDEX, PackedBatch
from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean
from tests.callbacks.toy import VOCABULARY, MemoryLogger, ToyLM, ToyModel, loader, run_fit

NAMES = ["code", "my prose", "web"]
KEYS = {"code": "code", "my prose": "my_prose", "web": "web"}


class Doc(NamedTuple):
    """A document: its source, its tokens, and how many of its first targets are masked."""

    source: int
    length: int
    masked: int = 0


#: Split documents, one-token documents, masked prompts, a whole document without targets.
ROWS = (
    [Doc(0, 5), Doc(1, 1), Doc(0, 4, masked=2), Doc(2, 6)],
    [Doc(1, 9, masked=8), Doc(2, 1), Doc(0, 6)],
    [Doc(2, 3), Doc(2, 5), Doc(1, 8)],
    [Doc(0, 16, masked=14)],
    [Doc(1, 2), Doc(1, 2), Doc(0, 12, masked=3)],
)


def row(seed: int, documents: Sequence[Doc], padding: int = 4, divisor: int = 24) -> PackedBatch:
    """A packed row of documents and padding, token by token."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    bounds = [0]
    for document in [*documents, Doc(-1, padding, masked=padding)]:
        tokens = torch.randint(0, VOCABULARY, (document.length,), generator=generator).tolist()
        targets = [*tokens[1:], IGNORE_INDEX]
        hidden = min(document.masked, document.length)
        ids += tokens
        labels += [IGNORE_INDEX] * hidden + targets[hidden:]
        positions += range(document.length)
        sources += [document.source] * document.length
        bounds.append(len(ids))
    keys = [[document.source, number] for number, document in enumerate(documents)] + [[-1, -1]]
    return PackedBatch(
        input_ids=torch.tensor([ids]),
        shift_labels=torch.tensor([labels]),
        position_ids=torch.tensor([positions]),
        source_ids=torch.tensor([sources]),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(later - earlier for earlier, later in zip(bounds, bounds[1:], strict=False)),
        document_keys=torch.tensor(keys),
        loss_divisor=divisor,
    )


BATCHES = [row(seed, documents) for seed, documents in enumerate(ROWS)]


def per_source(batches: Iterable[Any], model: ToyModel | None = None) -> dict[int, tuple[float, int]]:
    """Sum of losses and number of targets by source, one token at a time; the source is the target token's."""
    model = model or ToyModel()
    sums: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0])
    for batch in batches:
        with torch.no_grad():
            logits = model.head(model(batch["input_ids"]))[0].double()
        labels, sources = batch["shift_labels"][0].tolist(), batch["source_ids"][0].tolist()
        for place, label in enumerate(labels):
            if label == IGNORE_INDEX:
                continue
            source = sources[min(place + 1, len(sources) - 1)]
            sums[source][0] += F.cross_entropy(logits[place : place + 1], torch.tensor([label])).item()
            sums[source][1] += 1
    return {source: (total, int(count)) for source, (total, count) in sums.items()}


def expected_metrics(
    batches: Iterable[Any], model: ToyModel | None = None, prefix: str = "channel"
) -> dict[str, float]:
    """What ChannelLoss must log for one window."""
    sums = per_source(batches, model)
    total = sum(count for _, count in sums.values())
    metrics = {f"{prefix}_loss/coverage": 1.0}
    for source, (loss, count) in sums.items():
        key = KEYS[NAMES[source]]
        metrics |= {
            f"{prefix}_loss/{key}": loss / count,
            f"{prefix}_loss_weighted/{key}": loss / total,
            f"{prefix}_tokens/{key}": count,
        }
    return metrics


def channel_rows(logger: MemoryLogger, prefix: str = "channel") -> list[tuple[int | None, dict[str, float]]]:
    """The rows that ChannelLoss wrote."""
    starts = tuple(f"{prefix}_{word}" for word in ("loss", "tokens", "samples", "input_tokens", "label_tokens"))
    found = [(step, {key: row[key] for key in row if key.startswith(starts)}) for step, row in logger.rows]
    return [(step, metrics) for step, metrics in found if metrics]


def fit(
    channel: ChannelLoss, module: ToyLM | None = None, batches: Sequence[Any] = BATCHES, **settings: Any
) -> MemoryLogger:
    """Fit with the callback and ExactTokenMean; weights stand still unless a module is given."""
    callbacks = settings.pop("callbacks", [ExactTokenMean(), channel])
    trainer = run_fit(callbacks, module or ToyLM(lr=0.0), batches, **settings)
    return trainer.logger


__all__ = [
    "BATCHES",
    "KEYS",
    "NAMES",
    "ROWS",
    "Doc",
    "channel_rows",
    "expected_metrics",
    "fit",
    "loader",
    "per_source",
    "row",
]
