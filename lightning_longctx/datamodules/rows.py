"""Stream, pool, policy and packer put together: the rows of one reader rank, and the state after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.balance import planning_depth
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.documents import Document, DocumentReader, Draw
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.packing import pack_documents
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.datamodules.row_state import COUNTERS, PlannedRow, RowState
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.sources import IndexableSource
from lightning_longctx.datamodules.stream import DocumentStream, Share, open_stream
from lightning_longctx.errors import DataError

__all__ = ["COUNTERS", "RowBuilder", "RowSettings", "RowState", "RowWarmup"]

#: Fill that ``cut_to_fill`` reaches: the default target of the adaptive policy. A smaller gap is not worth a cut.
CUT_TARGET = 0.998


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
    """

    def __init__(self, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
        self._settings = settings
        self._policy = policy
        self._state = state
        self._pool = DocumentPool(state.candidates, settings.count_targets)
        self._row = state.rows
        self._planned = list(state.planned)
        self._counters = Counter(state.counters)
        self._drawn = state.drawn
        self._exhausted = state.exhausted
        self._loader: Any = None
        self._stopped = False
        self._draws: Iterator[Draw] | None = None
        if not settings.balance and len(self._planned) > 1:  # the new configuration wins: rows are chosen again
            self._pool = DocumentPool(state.waiting, settings.count_targets)
            self._planned = []
        # Another policy than the one that was saved starts afresh: the new configuration wins.
        if state.policy.get("class") == type(policy).__name__:
            policy.load_state_dict(state.policy["state"])

    def plan(self) -> None:
        """Choose rows ahead: one, or under ``balance`` as many as the ranks pick from. Fewer at the end of the epoch.

        Raises:
            DataError: a bad record under ``on_bad_record: error``, or a document that changed since the state was
                saved. Everything that can fail for a row fails here, before the ranks agree on it.
        """
        wanted = planning_depth(self._row) if self._settings.balance else 1
        for planned in self._planned:  # after a resume
            self._fetch(planned.candidates)
        while len(self._planned) < wanted and (chosen := self._choose()):
            self._fetch(chosen)
            self._planned.append(PlannedRow(self._row, tuple(chosen)))

    def offers(self) -> list[tuple[int, float]]:
        """Of each planned row, oldest first: when it was planned, and what it costs. Empty at the end of the epoch."""
        return [(planned.row, planned.cost) for planned in self._planned]

    def give(self, index: int = 0) -> PackedBatch:
        """Pack a planned row and take it out of the plan."""
        budget, multiple = self._settings.budget, self._settings.pad_to_multiple_of
        chosen = self._planned.pop(index).candidates
        documents = [candidate.document for candidate in chosen if candidate.document is not None]
        row = pack_documents(documents, budget.counted, multiple, max_tokens=budget.physical)
        tokens = sum(candidate.length for candidate in chosen)
        self._row += 1
        self._counters["rows"] += 1
        self._counters["documents_packed"] += len(chosen)
        self._counters["tokens_packed"] += tokens
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
        loader = self._loader
        return replace(
            self._state,
            rows=self._row,
            exhausted=self._exhausted,
            drawn=self._drawn,
            num_workers=self._settings.num_workers,
            stream=self._state.stream if loader is None else loader.state_dict(),
            candidates=self._pool.candidates,
            planned=tuple(self._planned),
            policy={"class": type(self._policy).__name__, "state": self._policy.state_dict()},
            counters=dict(self._counters),
        )

    def counters_at_end(self) -> dict[str, int]:
        """The counts if no further row is given: planned rows and the pool are left over."""
        waiting = [candidate for planned in self._planned for candidate in planned.candidates]
        return dict(self._counters + _left_over([*waiting, *self._pool.candidates]))

    def open(self) -> None:
        """Start the worker processes. Without this they start with the first document."""
        if self._draws is None and not self._exhausted:
            self._draws = self._open()

    def stop(self) -> None:
        """Make a :meth:`plan` that runs in another thread fail before its next document."""
        self._stopped = True

    def close(self) -> None:
        """End the worker processes."""
        self._draws = self._loader = None

    def _choose(self) -> list[Candidate]:
        """The candidates of one more row; none at the end of the epoch."""
        settings = self._settings
        row = self._row + len(self._planned)
        budget = (
            settings.budget
            if settings.warmup is None
            else settings.warmup.budget(settings.budget, self._state.earlier_rows + row, settings.pad_to_multiple_of)
        )
        chosen = plan_row(self._pool, self._policy, budget, row, self._draw)
        left = budget.physical - sum(candidate.length for candidate in chosen)
        if settings.cut_to_fill and chosen and not settings.count_targets:
            piece = self._pool.cut(left, worth=round((1 - CUT_TARGET) * budget.physical))
            if piece is not None:
                self._counters["documents_cut"] += 1
                chosen.append(piece)
        if settings.drop_last and chosen and self._exhausted and self._pool.tokens < left:
            self._counters += _left_over([*chosen, *self._pool.take(range(len(self._pool)))])
            return []
        return chosen

    def _draw(self) -> list[Candidate] | None:
        if self._exhausted:
            return None
        if self._stopped:
            raise InterruptedError("reading was stopped")
        self.open()
        assert self._draws is not None
        draw = next(self._draws, None)
        if draw is None:
            self._exhausted = True
            return None
        if draw.error is not None:
            raise draw.error
        self._drawn += 1
        self._counters.update(draw.counts)
        return [Candidate.of(document) for document in draw.documents]

    def _open(self) -> Iterator[Draw]:
        state, settings = self._state, self._settings
        for source in settings.reader.sources:
            if isinstance(source, IndexableSource):
                len(source)  # makes its index here, once, and not in every worker
        usable = state.stream is not None and state.num_workers == settings.num_workers
        share = Share(state.dp_rank, state.dp_size, state.deals, 0 if usable else state.drawn)
        sequence = replace(settings.sequence, epoch=state.epoch)
        stream = DocumentStream(settings.reader, sequence, share)
        self._loader = open_stream(stream, settings.num_workers, sequence.seed, state.stream if usable else None)
        draws: Iterator[Draw] = iter(self._loader)
        return draws

    def _fetch(self, candidates: Iterable[Candidate]) -> None:
        """Read again the tokens of candidates of which only the number was saved."""
        for candidate in candidates:
            if candidate.document is None:
                candidate.document = self._read_again(candidate)

    def _read_again(self, candidate: Candidate) -> Document:
        source = self._settings.reader.sources[candidate.source_id]
        assert isinstance(source, IndexableSource)
        draw = self._settings.reader.draw(candidate.source_id, candidate.number)
        for document in draw.documents:
            offset = candidate.start - document.start
            if offset >= 0 and offset + candidate.length <= len(document):
                return document.part(offset, offset + candidate.length)
        got = f"{source.describe(candidate.number)}: {draw.error or [len(document) for document in draw.documents]}"
        fix = "Resume with the same files, tokenizer and window, or start anew."
        raise DataError(f"data.sources.{source.name}", "must give the tokens it gave before the stop", got, fix)


def _left_over(candidates: Sequence[Candidate]) -> Counter[str]:
    tokens = sum(candidate.length for candidate in candidates)
    return Counter(documents_left_over=len(candidates), tokens_left_over=tokens)
