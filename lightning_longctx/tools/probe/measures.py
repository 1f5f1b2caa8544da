"""The figures of the probe, from rows alone: pure functions, the same for measured and replayed streams."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import mean, median

from lightning_longctx.tools.probe.streams import Row, Stream

__all__ = ["Bucket", "FirstRow", "PolicyFigures", "RankFigures", "histogram", "policy_figures", "rank_figures"]


@dataclass(frozen=True)
class RankFigures:
    """One data-parallel rank under one policy. Fills are parts of the budget; None where there is no such row.

    Attributes:
        seed: of the order of documents.
        rank: data-parallel rank.
        documents: read before the first row.
        seconds: to the first row.
        first_fill: of the first row.
        steady_fill: mean of the later rows that were made before the documents ended.
        rows: how many there are.
        tail_rows: those made after the documents had ended.
        longest_wait: most rows that a document waited.
        peak_windows: most tokens that waited before a row, in budgets.
        choice: hash of the documents of all rows, in order.
    """

    seed: int
    rank: int
    documents: int
    seconds: float
    first_fill: float | None
    steady_fill: float | None
    rows: int
    tail_rows: int
    longest_wait: int
    peak_windows: float
    choice: str


@dataclass(frozen=True)
class FirstRow:
    """What all ranks together need for their first row.

    Attributes:
        p50: median over ranks.
        slowest: of the rank that needs most: the run starts then.
        skew: slowest over median.
    """

    p50: float
    slowest: float
    skew: float


@dataclass(frozen=True)
class PolicyFigures:
    """All ranks and seeds under one policy.

    Attributes:
        name: as YAML has it, or the class name.
        gate: the policy's own description.
        measured: whether rows were really made; otherwise the policy chose from recorded lengths.
        refused: why the policy does not work in this run; everything else is empty then.
        ranks: one entry for each seed and rank.
        documents: read before the first row.
        seconds: to the first row.
        first_fills: by seed: selected tokens of the first row over all ranks / (ranks x budget).
        steady_fills: by seed: the same, mean over the later micro-batches that all ranks made before their documents
            ended.
        fills: by seed: the same for each micro-batch that all ranks made.
        worst_fill: the emptiest row of a rank, first and tail rows left out.
        order_drift: mean length of the documents in the first third of the rows, relative to the mean of all documents
            read; -0.1 means that they were 10 % shorter.
        imbalance: attention work (sum of squared document lengths) of the rank that has most over the mean of the
            ranks, for each micro-batch that all ranks made.
    """

    name: str
    gate: str
    measured: bool
    refused: str | None
    ranks: list[RankFigures]
    documents: FirstRow | None
    seconds: FirstRow | None
    first_fills: list[float]
    steady_fills: list[float | None]
    fills: list[list[float]]
    worst_fill: float | None
    order_drift: float | None
    imbalance: list[float]

    @property
    def mean_imbalance(self) -> float | None:
        """Mean over micro-batches."""
        return mean(self.imbalance) if self.imbalance else None

    @property
    def lost_to_imbalance(self) -> float | None:
        """Part of the attention time that the ranks wait for the slowest one."""
        return mean(1 - 1 / ratio for ratio in self.imbalance) if self.imbalance else None


@dataclass(frozen=True)
class Bucket:
    """Documents whose length is from ``low`` to below ``2 * low`` tokens."""

    low: int
    documents: int
    tokens: int


def policy_figures(
    name: str, gate: str, streams: Sequence[Stream], window: int, measured: bool, refused: str | None = None
) -> PolicyFigures:
    """Put the streams of all seeds and ranks together.

    Args:
        name: of the policy.
        gate: its description.
        streams: all seeds and ranks; a policy that never gave a row on some rank has no figures for all ranks.
        window: budget of a row in tokens.
        measured: whether rows were really made.
        refused: why there are none.
    """
    started = [stream for stream in streams if stream.rows]
    seeds = list(dict.fromkeys(stream.seed for stream in streams)) if len(started) == len(streams) else []
    groups = [[stream for stream in streams if stream.seed == seed] for seed in seeds]
    steps = [list(zip(*(stream.rows for stream in group), strict=False)) for group in groups]
    fills = [[mean(row.fill for row in step) for step in of_seed] for of_seed in steps]
    later = [row for stream in started for row in stream.rows[1:] if not row.tail]
    return PolicyFigures(
        name=name,
        gate=gate,
        measured=measured,
        refused=refused,
        ranks=[rank_figures(stream, window) for stream in streams],
        documents=_first_row([float(stream.first_documents) for stream in streams]) if seeds else None,
        seconds=_first_row([stream.first_seconds for stream in streams]) if seeds else None,
        first_fills=[of_seed[0] for of_seed in fills],
        steady_fills=[_steady(of_seed) for of_seed in steps],
        fills=fills,
        worst_fill=min((row.fill for row in later), default=None),
        order_drift=_order_drift(started),
        imbalance=[_max_over_mean(step) for of_seed in steps for step in of_seed if len(step) > 1],
    )


def rank_figures(stream: Stream, window: int) -> RankFigures:
    """The figures of one stream.

    Args:
        stream: the rows.
        window: budget of a row in tokens.
    """
    steady = [row.fill for row in stream.rows[1:] if not row.tail]
    return RankFigures(
        seed=stream.seed,
        rank=stream.rank,
        documents=stream.first_documents,
        seconds=stream.first_seconds,
        first_fill=stream.rows[0].fill if stream.rows else None,
        steady_fill=mean(steady) if steady else None,
        rows=len(stream.rows),
        tail_rows=sum(row.tail for row in stream.rows),
        longest_wait=max((row.wait for row in stream.rows), default=0),
        peak_windows=max((row.pool_tokens for row in stream.rows), default=0) / window,
        choice=_choice(stream.rows),
    )


def histogram(lengths: Iterable[int]) -> list[Bucket]:
    """Lengths by powers of two, shortest first, without gaps.

    Example:
        >>> histogram([3, 5, 7])
        [Bucket(low=2, documents=1, tokens=3), Bucket(low=4, documents=2, tokens=12)]
    """
    documents: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for length in lengths:
        level = length.bit_length() - 1
        documents[level] += 1
        tokens[level] += length
    levels = range(min(documents), max(documents) + 1) if documents else range(0)
    return [Bucket(2**level, documents[level], tokens[level]) for level in levels]


def _steady(steps: Sequence[tuple[Row, ...]]) -> float | None:
    fills = [mean(row.fill for row in step) for step in steps[1:] if not any(row.tail for row in step)]
    return mean(fills) if fills else None


def _first_row(values: Sequence[float]) -> FirstRow:
    middle, slowest = median(values), max(values)
    return FirstRow(middle, slowest, slowest / middle if middle else 1.0)


def _order_drift(streams: Sequence[Stream]) -> float | None:
    # Weighted by documents, so that a rank of few long documents counts as what it is.
    emitted = [part for stream in streams for part in _first_third(stream)]
    read = [entry.length for stream in streams for draw in stream.draws for entry in draw.entries]
    if not emitted:
        return None
    documents = sum(length / whole for length, whole in emitted)
    return sum(length for length, _ in emitted) / documents / mean(read) - 1


def _first_third(stream: Stream) -> Iterator[tuple[int, int]]:
    """Tokens of each document of the first rows, and those it had when it was read: `cut_to_fill` cuts some."""
    read: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for entry in (entry for draw in stream.draws for entry in draw.entries):
        read[entry.source_id, entry.number].add(entry.length)
    for row in stream.rows[: max(1, len(stream.rows) // 3)]:
        for source, number, length in row.documents:
            yield length, min((whole for whole in read[source, number] if whole >= length), default=length)


def _max_over_mean(step: Sequence[Row]) -> float:
    costs = [sum(length**2 for _, _, length in row.documents) for row in step]
    return max(costs) / mean(costs)


def _choice(rows: Sequence[Row]) -> str:
    digest = sha256()
    for row in rows:
        digest.update(repr(row.documents).encode())
    return digest.hexdigest()[:12]
