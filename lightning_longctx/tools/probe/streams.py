"""The streams that are measured: each data-parallel rank reads, packs and slices its own rows, and is watched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from lightning_longctx.batch import IGNORE_INDEX, PackedBatch
from lightning_longctx.datamodules import Budget, BufferPolicy, DynamicBatchingDataModule, PoolView
from lightning_longctx.datamodules.balance import pick_rows
from lightning_longctx.datamodules.feed import CandidateFeed, DocumentFeed, Head
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.rows import RowBuilder, RowSettings, RowState
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.topology import Topology

__all__ = [
    "Draw",
    "Entry",
    "FirstRows",
    "MeasuredRows",
    "Row",
    "Stream",
    "WatchedRows",
    "advance_together",
    "read_streams",
]


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
        head: its source, and the pass over it.
    """

    entries: tuple[Entry, ...]
    seconds: float
    head: Head | None = None


class Row(NamedTuple):
    """A packed row.

    Attributes:
        documents: (source id, number, tokens) of each, in order of packing, without padding.
        fill: what the budget counts of it (tokens, or targets), over the budget.
        tail: whether the stream had ended when the row was chosen.
        wait: most rows that a document of it had waited.
        pool_documents: documents that waited before the row was chosen.
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


class _Choice(NamedTuple):
    arrival: int  # row number at which the oldest of the chosen documents came
    pool_documents: int
    pool_tokens: int
    budget: int
    tail: bool


class _WatchedPolicy(BufferPolicy):
    """Chooses as another policy, and tells what it chose from."""

    def __init__(self, policy: BufferPolicy, note: Callable[[PoolView, Budget, list[int]], None]) -> None:
        self.policy = policy
        self._note = note

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        return self.policy.is_ready(view, budget)

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        indices = self.policy.select(view, budget)
        self._note(view, budget, indices)
        return indices

    def describe(self) -> str:
        return self.policy.describe()

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state)


class WatchedRows(RowBuilder):
    """The rows of training, with a record of what was chosen.

    Args:
        settings: as in training.
        policy: resolved.
        state: where to start.
        feed: where candidates come from.

    Attributes:
        settings: as given.
        policy: as given.
        rows: what was chosen so far.
        first_documents: documents read before the first row; all so far while there is none.
        first_seconds: time to the first row; all so far while there is none.
    """

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState, feed: CandidateFeed) -> None:
        super().__init__(settings, _WatchedPolicy(policy, self._note), state, feed)
        self.settings = settings
        self.policy = policy
        self.rows: list[Row] = []
        self.first_documents, self.first_seconds = 0, 0.0
        self._choices: list[_Choice] = []  # of the planned rows

    @property
    def starved(self) -> bool:
        """Whether a choice needed documents that a record does not hold; never where they are read."""
        return False

    @property
    def ended(self) -> bool:
        """Whether the documents have ended."""
        return self.exhausted and not self.starved

    def advance(self, index: int = 0) -> None:
        """Make a planned row."""
        choice = self._choices.pop(index)
        documents, counted = self._make(index)
        wait = max(0, len(self.rows) - choice.arrival)
        fill = counted / choice.budget
        self.rows.append(Row(documents, fill, choice.tail, wait, choice.pool_documents, choice.pool_tokens))

    @abstractmethod
    def _make(self, index: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
        """The documents of a planned row, which is taken out of the plan, and what the budget counts of them."""

    def _note(self, view: PoolView, budget: Budget, indices: list[int]) -> None:
        arrival = min(view.arrivals[index] for index in indices)
        self._choices.append(_Choice(arrival, len(view.lengths), view.tokens, budget.counted, self.ended))


class _TimedFeed(DocumentFeed):
    """The documents of training, timed and noted."""

    def __init__(self, settings: RowSettings, state: RowState) -> None:
        super().__init__(settings.reader, settings.sequence, settings.num_workers, state)
        self.draws: list[Draw] = []
        self._reading = 0.0

    def draw(self) -> list[Candidate] | None:
        start = perf_counter()
        head = self.head()
        candidates = super().draw()
        self._reading += perf_counter() - start
        if candidates is not None:
            entries = tuple(Entry(c.source_id, c.number, c.start, c.length, c.targets) for c in candidates)
            self.draws.append(Draw(entries, self._reading, head))
        return candidates


class MeasuredRows(WatchedRows):
    """Reads, packs and slices.

    Attributes:
        draws: everything that was read, in order.
        kept: the first rows themselves.
        keep: how many of them.
    """

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
        feed = _TimedFeed(settings, state)
        super().__init__(settings, policy, state, feed)
        self.draws = feed.draws
        self.kept: list[PackedBatch] = []
        self.keep = 0
        self.sharder = RowSharder(Topology())

    def plan(self) -> None:
        """As in training, timed."""
        start = perf_counter()
        super().plan()
        self._spend(start)

    def advance(self, index: int = 0) -> None:
        """As in training, timed."""
        start = perf_counter()
        super().advance(index)
        if len(self.rows) == 1:
            self.first_seconds += perf_counter() - start

    def _spend(self, start: float) -> None:
        if not self.rows:
            self.first_seconds += perf_counter() - start
            self.first_documents = sum(len(draw.entries) for draw in self.draws)

    def _make(self, index: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
        batch = self.give(index)
        self.sharder.shard(batch, batch)
        self.kept.extend([batch] if len(self.kept) < self.keep else [])
        keys, lengths = batch["document_keys"].tolist(), batch["cu_seqlens"].diff().tolist()
        documents = tuple(
            (source, number, length)
            for (source, number), length in zip(keys, lengths, strict=True)
            if source >= 0  # no padding
        )
        if self.settings.count_targets:
            return documents, int((batch["shift_labels"] != IGNORE_INDEX).sum())
        return documents, sum(length for _, _, length in documents)


def advance_together(ranks: Sequence[WatchedRows], micro_batches: int) -> None:
    """Make rows of all ranks step by step, each rank until it has as many as asked for or none is left.

    Args:
        ranks: with ``balance`` all data-parallel ranks, since each picks by what the others could give.
        micro_batches: most rows of a rank.
    """
    going = list(ranks)
    for _ in range(micro_batches):
        for rank in going:
            rank.plan()
        going = [rank for rank in going if rank.offers() and not rank.starved]
        for rank, index in zip(going, pick_rows([rank.offers() for rank in going]), strict=True):
            rank.advance(index)


class FirstRows(MeasuredRows):
    """The same without worker processes, of one rank that does not wait for what others could give."""

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
        super().__init__(replace(settings, num_workers=0, balance=False), policy, state)


def read_streams(
    data: DynamicBatchingDataModule,
    topologies: Sequence[Topology],
    seed: int | None,
    micro_batches: int,
    keep: int,
    kind: type[MeasuredRows] = MeasuredRows,
) -> list[Stream]:
    """Make the rows of all data-parallel ranks as training would, and slice each as its reader rank does.

    Args:
        data: the data module.
        topologies: one for each rank, without groups.
        seed: of the order of documents; None for that of the configuration.
        micro_batches: rows to make; fewer if the documents end.
        keep: how many of the first rows of the first rank to keep.
        kind: how rows are read.

    Raises:
        DataError: a bad record, as in training.
        BatchContractError: a row that breaks a rule.
    """
    ranks = []
    for topology in topologies:
        rank = data.row_builder(topology, seed, kind)
        assert isinstance(rank, MeasuredRows)
        rank.sharder = RowSharder(topology)
        ranks.append(rank)
    ranks[0].keep = keep
    # One after another where ranks do not depend on one another, so that only one has worker processes.
    for group in [ranks] if ranks[0].settings.balance else [[rank] for rank in ranks]:
        try:
            advance_together(group, micro_batches)
        finally:
            for rank in group:
                rank.close()
    return [
        Stream(
            seed=rank.settings.sequence.seed,
            rank=topology.dp_rank,
            rows=rank.rows,
            first_documents=rank.first_documents,
            first_seconds=rank.first_seconds,
            draws=rank.draws,
            ended=rank.ended,
            kept=rank.kept,
        )
        for rank, topology in zip(ranks, topologies, strict=True)
    ]
