"""From sums by slot to the numbers that are logged, on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_longctx.callbacks.channel_settings import ChannelOptions
from lightning_longctx.callbacks.channel_sums import Count, SlotTotals
from lightning_longctx.callbacks.source_names import SafeNames, SourceTable

__all__ = ["ChannelValue", "channel_metrics", "channel_values", "coverage_of"]


class ChannelValue(NamedTuple):
    """The values of one source over one window.

    Attributes:
        loss: sum of its targets' losses / number of its targets.
        weighted_loss: the same sum / targets of all sources: its share of the loss.
        targets: its targets.
        tokens: its tokens, without padding; 0 unless counted.
        samples: its documents (rows, where documents are not told); 0 unless counted.
    """

    loss: float
    weighted_loss: float
    targets: int
    tokens: int = 0
    samples: int = 0


def channel_values(totals: SlotTotals, table: SourceTable) -> dict[str, ChannelValue]:
    """Read reduced sums on the host: a value for each source with targets, by name, in the order of slots.

    Example:
        >>> import torch
        >>> from lightning_longctx.callbacks.channel_sums import ChannelSums
        >>> sums = ChannelSums(3, torch.device("cpu"))
        >>> sums.add(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True] * 3), torch.tensor([0, 0, 2]))
        >>> values = channel_values(sums.totals(), SourceTable(["code", "idle", "web"]))
        >>> [(name, value.loss, value.weighted_loss, value.targets) for name, value in values.items()]
        [('code', 1.5, 1.0, 2), ('web', 6.0, 2.0, 1)]
    """
    losses, counts = totals.losses.tolist()[:-1], totals.counts[:, :-1].tolist()
    recorded = sum(counts[Count.TARGETS])
    return {
        table.name(slot): ChannelValue(
            losses[slot] / targets,
            losses[slot] / recorded,
            targets,
            counts[Count.TOKENS][slot],
            counts[Count.SAMPLES][slot],
        )
        for slot, targets in enumerate(counts[Count.TARGETS])
        if targets
    }


def coverage_of(parts: Iterable[SlotTotals]) -> tuple[int, int]:
    """Recorded and supervised targets: those with a known slot, and all."""
    targets = [part.counts[Count.TARGETS].tolist() for part in parts]
    return sum(sum(counts[:-1]) for counts in targets), sum(sum(counts) for counts in targets)


def channel_metrics(
    totals: SlotTotals, table: SourceTable, keys: SafeNames, options: ChannelOptions, prefix: str, suffix: str = ""
) -> dict[str, float]:
    """Return what is logged of reduced sums, by key: ``<prefix>_loss/<source><suffix>`` and so on."""
    metrics: dict[str, float] = {}
    for name, value in channel_values(totals, table).items():
        key = keys(name) + suffix
        metrics[f"{prefix}_loss/{key}"] = value.loss
        if options.log_weighted:
            metrics[f"{prefix}_loss_weighted/{key}"] = value.weighted_loss
        if options.log_tokens:
            metrics[f"{prefix}_tokens/{key}"] = float(value.targets)
        counts = {"samples": value.samples, "input_tokens": value.tokens, "label_tokens": value.targets}
        metrics |= {f"{prefix}_{counter}/{key}": float(counts[counter]) for counter in options.counters}
    recorded, supervised = coverage_of([totals])
    if supervised:
        metrics[f"{prefix}_loss/coverage{suffix}"] = recorded / supervised
    return metrics
