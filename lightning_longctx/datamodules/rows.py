"""Stream, pool, policy and packer put together: the rows of one reader rank, and the state after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.balance import planning_depth
from lightning_longctx.datamodules.choosing import likely_next, plan_row
from lightning_longctx.datamodules.documents import DocumentReader
from lightning_longctx.datamodules.feed import CandidateFeed, DocumentFeed
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.packing import pack_documents
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.row_state import COUNTERS, PlannedRow, Reweight, RowState, left_over, packed_of
from lightning_longctx.datamodules.selection import Budget

__all__ = ["COUNTERS", "RowBuilder", "RowSettings", "RowState", "RowWarmup"]

#: Fill that ``cut_to_fill`` reaches: the default target of the adaptive policy. A smaller gap is not worth a cut.
CUT_TARGET = 0.998
# Rows of which a resume guesses the documents. Later ones depend on what is read meanwhile.
_GUESSED_ROWS = 4


@dataclass(frozen=True)
class RowWarmup:
    """A budget that grows linearly from ``initial_tokens`` to the full one.

    Attributes:
        rows: micro-batches of a rank over which it grows.
        initial_tokens: budget of the first row.
    """

    rows: int
    initial_tokens: int

    def budget(self, full: Budget, row: int, multiple: int) -> Budget:
        """The budget of row number ``row`` of the run, rounded up to the row's multiple."""
        if row >= self.rows:
            return full
        share = row / self.rows

        def grown(tokens: int) -> int:
            start = min(self.initial_tokens, tokens)
            return min(tokens, -(-round(start + (tokens - start) * share) // multiple) * multiple)

        return replace(full, counted=grown(full.counted), physical=grown(full.physical))


@dataclass(frozen=True)
class RowSettings:
    """What a reader needs to make rows.

    Args:
        reader: reads and tokenizes.
        sequence: order of documents; its epoch is set by the state.
        budget: of a row; its ``counted`` is the divisor of the loss.
        count_targets: whether the budget counts targets.
        pad_to_multiple_of: length of a row, in which the sequence-parallel size is contained already.
        num_workers: processes that read.
        drop_last: whether rows below the budget at the end are left out.
        cut_to_fill: whether one document is cut where whole ones leave a gap.
        balance: whether rows are planned ahead, so that ranks can take rows of like cost together.
        warmup: how the budget grows over the first rows; None for the full budget from the start.
    """

    reader: DocumentReader
    sequence: SequenceSettings
    budget: Budget
    count_targets: bool = False
    pad_to_multiple_of: int = 1
    num_workers: int = 0
    drop_last: bool = False
    cut_to_fill: bool = False
    balance: bool = False
    warmup: RowWarmup | None = None


class RowBuilder:
    """Makes the rows of one reader rank, one after another, from a state on.

    Args:
        settings: what to read and how to pack.
        policy: chooses; owned by this builder.
        state: where to start.
        feed: gives the candidates. Default: the documents of ``settings``. Tools give another to watch or to replay.
    """

    def __init__(
        self, settings: RowSettings, policy: BufferPolicy, state: RowState, feed: CandidateFeed | None = None
    ) -> None:
        if not settings.balance and len(state.planned) > 1:  # the new configuration wins: rows are chosen again
            state = replace(state, candidates=state.waiting, planned=())
        self._settings = settings
        self._policy = policy
        self._state = state
        self._feed = feed or DocumentFeed(settings.reader, settings.sequence, settings.num_workers, state)
        reader = settings.reader
        self._names = {reader.carried_id(place): source.name for place, source in enumerate(reader.sources)}
        self._row = state.rows
        self._planned = list(state.planned)
        self._counters = Counter(state.counters)
        self._exhausted = state.exhausted
        self._weights = state.weights
        self._mixed: Mapping[str, float] = {}  # the weights in force, where they are not those of the sources
        drawn = {source_id: state.drawn[name] for source_id, name in self._names.items() if name in state.drawn}
        self._pool = DocumentPool(state.candidates, settings.count_targets, drawn)
        # Another policy than the one that was saved starts afresh: the new configuration wins.
        if state.policy.get("class") == type(policy).__name__:
            policy.load_state_dict(state.policy["state"])
        if any(candidate.document is None for candidate in state.candidates):  # after a resume
            guess = likely_next(self._pool, policy, self._budget(self._row), self._row, _GUESSED_ROWS)
            self._feed.expect([*chain.from_iterable(planned.candidates for planned in self._planned), *guess])

    @property
    def exhausted(self) -> bool:
        """Whether no further document comes."""
        return self._exhausted

    def open(self) -> None:
        """Start the worker processes. Without this they start with the first document."""
        self._feed.start()

    def stop(self) -> None:
        """Make a :meth:`plan` that runs in another thread fail before its next document."""
        self._feed.stop()

    def reweight(self, row: int, weights: Mapping[str, float]) -> None:
        """Mix by other weights, by source name, from the documents on that are read for row number ``row``."""
        self._weights = (*self._weights, Reweight(row, dict(weights)))

    def plan(self) -> None:
        """Choose rows ahead: one, or under ``balance`` as many as the ranks pick from. Fewer at the end of the epoch.

        Raises:
            DataError: a bad record under ``on_bad_record: error``, or a document that changed since the state was
                saved. Everything that can fail for a row fails here, before the ranks agree on it.
        """
        wanted = planning_depth(self._row) if self._settings.balance else 1
        for planned in self._planned:  # after a resume
            self._feed.fetch(planned.candidates)
        while len(self._planned) < wanted and (chosen := self._choose()):
            self._feed.fetch(chosen)
            self._planned.append(PlannedRow(self._row, tuple(chosen)))

    def offers(self) -> list[tuple[int, float]]:
        """Of each planned row, oldest first: when it was planned, and what it costs. Empty at the end of the epoch."""
        return [(planned.row, planned.cost) for planned in self._planned]

    def take(self, index: int = 0) -> tuple[Candidate, ...]:
        """Take a planned row out of the plan, and count it as given."""
        chosen = self._planned.pop(index).candidates
        self._row += 1
        self._counters["rows"] += 1
        self._counters["documents_packed"] += len(chosen)
        for candidate in chosen:
            self._counters["tokens_packed"] += candidate.length
            self._counters[packed_of(self._names[candidate.source_id])] += candidate.length
        return chosen

    def give(self, index: int = 0) -> PackedBatch:
        """Pack a planned row and take it out of the plan."""
        budget, multiple = self._settings.budget, self._settings.pad_to_multiple_of
        chosen = self.take(index)
        documents = [candidate.document for candidate in chosen if candidate.document is not None]
        row = pack_documents(documents, budget.counted, multiple, max_tokens=budget.physical)
        tokens = sum(candidate.length for candidate in chosen)
        self._counters["tokens_padding"] += row["input_ids"].numel() - tokens
        targets = sum(candidate.targets for candidate in chosen)
        if targets * budget.physical < tokens * budget.counted and self._settings.count_targets:
            self._counters["rows_closed_by_cap"] += 1  # fuller by the cap on tokens than by the budget of targets
        return row

    def next_row(self) -> PackedBatch | None:
        """The next whole row of a rank on its own, or None at the end of the epoch."""
        self.plan()
        return self.give() if self._planned else None

    def state(self) -> RowState:
        """The state after the last row."""
        sources, count = self._feed.state()
        policy = self._policy
        return replace(
            self._state,
            exhausted=self._exhausted,
            rows=self._row,
            sources=sources,
            count=count,
            candidates=self._pool.candidates,
            planned=tuple(self._planned),
            weights=self._weights,
            drawn={self._names[source]: tokens for source, tokens in self._pool.drawn.items()},
            policy={"class": type(policy).__name__, "describe": policy.describe(), "state": policy.state_dict()},
            counters=dict(self._counters),
        )

    def counters_at_end(self) -> dict[str, int]:
        """The counts if no further row is given: planned rows and the pool are left over."""
        waiting = [candidate for planned in self._planned for candidate in planned.candidates]
        return dict(self._counters + left_over([*waiting, *self._pool.candidates]))

    def close(self) -> None:
        """End the worker processes."""
        self._feed.close()

    def _choose(self) -> list[Candidate]:
        """The candidates of one more row; none at the end of the epoch."""
        settings = self._settings
        row = self._row + len(self._planned)
        self._mix_for(row)
        budget = self._budget(row)
        chosen = plan_row(self._pool, self._policy, budget, row, lambda: self._draw(budget))
        left = budget.physical - sum(candidate.length for candidate in chosen)
        if settings.cut_to_fill and chosen and not settings.count_targets:
            piece = self._pool.cut(left, worth=round((1 - CUT_TARGET) * budget.physical))
            if piece is not None:
                self._counters["documents_cut"] += 1
                chosen.append(piece)
        if settings.drop_last and chosen and self._exhausted and self._is_short(chosen, budget):
            self._counters += left_over([*chosen, *self._pool.take(range(len(self._pool)))])
            return []
        return chosen

    def _is_short(self, chosen: list[Candidate], budget: Budget) -> bool:
        """Whether all that waits is below the budget: of tokens, and under ``count_targets`` of targets as well."""
        rest = [*chosen, *self._pool.candidates]
        if self._settings.count_targets and sum(candidate.targets for candidate in rest) >= budget.counted:
            return False
        return sum(candidate.length for candidate in rest) < budget.physical

    def _budget(self, row: int) -> Budget:
        settings = self._settings
        if settings.warmup is None:
            return settings.budget
        return settings.warmup.budget(settings.budget, self._state.earlier_rows + row, settings.pad_to_multiple_of)

    def _mix_for(self, row: int) -> None:
        """Put the weights in force that were set for row number ``row`` or an earlier one."""
        due = [entry for entry in self._weights if entry.row <= row]
        weights = dict(chain.from_iterable(entry.weights.items() for entry in due))
        if weights == self._mixed:
            return
        self._feed.reweight(weights)
        self._mixed = weights
        self._weights = (Reweight(due[-1].row, weights), *self._weights[len(due) :])

    def _draw(self, budget: Budget) -> list[Candidate] | None:
        """The candidates of the next document; None if there is none, or none before more rows were given."""
        if self._exhausted or self._comes_too_soon(budget):
            return None
        found = self._feed.draw()
        self._counters.update(self._feed.counts())
        self._exhausted = found is None
        return found

    def _comes_too_soon(self, budget: Budget) -> bool:
        """Whether the next document is of a further pass over a source while one before it still waits.

        Then it has to wait, except where a row could not be filled or mixed without it: where several sources have less
        than a row of tokens together.
        """
        head = self._feed.head() if self._settings.sequence.stop_mode == "forever" else None
        if head is None or head.passes == 0:
            return False
        if len(self._names) > 1 and self._pool.tokens < budget.physical:
            return False
        waiting = chain(self._pool.candidates, *(planned.candidates for planned in self._planned))
        return any(found.source_id == head.source_id and found.passes < head.passes for found in waiting)
