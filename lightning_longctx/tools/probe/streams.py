"""The streams that are measured: each data-parallel rank reads, packs and slices its own rows, and is watched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from lightning_longctx.batch import IGNORE_INDEX, PackedBatch
from lightning_longctx.datamodules import Budget, BufferPolicy, DynamicBatchingDataModule, PoolView
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowState
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.topology import Topology

__all__ = ["Draw", "Entry", "Row", "Stream", "WatchedPolicy", "WatchedRows", "read_stream"]


class Entry(NamedTuple):
    """A document of a stream: source id, number in the source, first token within it, tokens, trained tokens."""

    source_id: int
    number: int
    start: int
    length: int
    targets: int


class Draw(NamedTuple):
    """What one record gave.

    Attributes:
        entries: its documents: none if it was dropped, several if it was split.
        seconds: spent on reading, from the start of the stream up to here.
    """

    entries: tuple[Entry, ...]
    seconds: float


class Row(NamedTuple):
    """A packed row.

    Attributes:
        documents: (source id, number, tokens) of each, in order of packing, without padding.
        fill: what the budget counts of it (tokens, or targets), over the budget.
        tail: whether the stream had ended when the row was made.
        wait: most rows that a document of it had waited.
        pool_documents: documents that waited before the row was taken.
        pool_tokens: their tokens.
    """

    documents: tuple[tuple[int, int, int], ...]
    fill: float
    tail: bool
    wait: int
    pool_documents: int
    pool_tokens: int


@dataclass(frozen=True)
class Stream:
    """The rows of one data-parallel rank.

    Attributes:
        seed: of the order of documents.
        rank: data-parallel rank.
        rows: in order.
        first_documents: documents read before the first row; all of them where there is no row.
        first_seconds: time to the first row.
        draws: everything that was read, in order.
        ended: whether the documents ended before all rows were made.
        kept: the first rows themselves, if they were asked for.
    """

    seed: int
    rank: int
    rows: list[Row]
    first_documents: int
    first_seconds: float
    draws: list[Draw]
    ended: bool
    kept: list[PackedBatch] = field(default_factory=list)


class WatchedPolicy(BufferPolicy):
    """Chooses as another policy, and notes what it chose from.

    Args:
        policy: the other policy, resolved.
    """

    def __init__(self, policy: BufferPolicy) -> None:
        self.policy = policy
        self.choices: list[tuple[int, int, int, int]] = []  # wait, documents and tokens of the pool, budget

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """As the other policy."""
        return self.policy.is_ready(view, budget)

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """As the other policy."""
        indices = self.policy.select(view, budget)
        wait = view.row - min(view.arrivals[index] for index in indices)
        self.choices.append((wait, len(view.lengths), view.tokens, budget.counted))
        return indices

    def describe(self) -> str:
        """As the other policy."""
        return self.policy.describe()

    def state_dict(self) -> dict[str, Any]:
        """As the other policy."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the other policy."""
        self.policy.load_state_dict(state)

    def latest(self) -> tuple[int, int, int, int]:
        """Largest values since the last call: wait, documents and tokens of the pool, budget. There was a choice."""
        choices, self.choices = self.choices, []
        wait, documents, tokens, budget = (max(values) for values in zip(*choices, strict=True))
        return wait, documents, tokens, budget


class WatchedRows(RowBuilder):
    """The rows of training, with a record of all that was read."""

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
        self.watched = WatchedPolicy(policy)
        super().__init__(settings, self.watched, state)
        self.settings = settings
        self.draws: list[Draw] = []
        self.ended = False
        self._seconds = 0.0

    def _draw(self) -> list[Candidate] | None:
        start = perf_counter()
        candidates = super()._draw()
        self._seconds += perf_counter() - start
        if candidates is None:
            self.ended = True
            return None
        entries = tuple(Entry(c.source_id, c.number, c.start, c.length, c.targets) for c in candidates)
        self.draws.append(Draw(entries, self._seconds))
        return candidates


def read_stream(
    data: DynamicBatchingDataModule, topology: Topology, seed: int | None, micro_batches: int, keep: int = 0
) -> Stream:
    """Make the rows of one data-parallel rank as training would, and slice each as its reader rank does.

    Args:
        data: the data module.
        topology: ranks and sizes; without groups.
        seed: of the order of documents; None for that of the configuration.
        micro_batches: rows to make; fewer if the documents end.
        keep: how many of the first rows to keep.

    Raises:
        DataError: a bad record, as in training.
        BatchContractError: a row that breaks a rule.
    """
    builder = data.row_builder(topology, seed, WatchedRows)
    assert isinstance(builder, WatchedRows)
    sharder = RowSharder(topology)
    rows: list[Row] = []
    kept: list[PackedBatch] = []
    documents, seconds, start = 0, 0.0, perf_counter()
    try:
        while len(rows) < micro_batches and (batch := builder.next_row()) is not None:
            sharder.shard(batch, batch)
            if not rows:
                seconds, documents = perf_counter() - start, _documents(builder.draws)
            rows.append(_row(batch, builder))
            kept.extend([batch] if len(kept) < keep else [])
    finally:
        builder.close()
    return Stream(
        seed=builder.settings.sequence.seed,
        rank=topology.dp_rank,
        rows=rows,
        first_documents=documents if rows else _documents(builder.draws),
        first_seconds=seconds if rows else perf_counter() - start,
        draws=builder.draws,
        ended=builder.ended,
        kept=kept,
    )


def _documents(draws: list[Draw]) -> int:
    return sum(len(draw.entries) for draw in draws)


def _row(batch: PackedBatch, builder: WatchedRows) -> Row:
    wait, pool_documents, pool_tokens, budget = builder.watched.latest()
    keys, lengths = batch["document_keys"].tolist(), batch["cu_seqlens"].diff().tolist()
    documents = tuple((source, number, length) for (source, number), length in zip(keys, lengths, strict=True))
    real = tuple(document for document in documents if document[0] >= 0)
    tokens = sum(length for _, _, length in real)
    counted = int((batch["shift_labels"] != IGNORE_INDEX).sum()) if builder.settings.count_targets else tokens
    return Row(real, counted / budget, builder.ended, wait, pool_documents, pool_tokens)
