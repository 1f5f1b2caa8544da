"""Stream, pool, policy and packer put together: the rows of one reader rank, and the state after each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

from lightning_longctx.batch import PackedBatch
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.documents import Document, DocumentReader, Draw
from lightning_longctx.datamodules.mixing import SequenceSettings
from lightning_longctx.datamodules.packing import pack_documents
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.pool import Candidate, DocumentPool, candidates_from_state, candidates_to_state
from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.sources import IndexableSource
from lightning_longctx.datamodules.stream import Deal, DocumentStream, Share, open_stream
from lightning_longctx.errors import DataError

__all__ = ["COUNTERS", "RowBuilder", "RowSettings", "RowState"]

#: Everything that is counted. tokens_read = tokens packed + dropped + truncated + left over + waiting in the pool.
COUNTERS = (
    "rows",
    "documents_read",
    "documents_packed",
    "documents_split",
    "documents_truncated",
    "documents_without_tokens",
    "documents_below_min_tokens",
    "documents_above_max_tokens",
    "documents_longer_than_window_dropped",
    "documents_left_over",
    "tokens_read",
    "tokens_packed",
    "tokens_padding",
    "tokens_dropped",
    "tokens_truncated",
    "tokens_left_over",
    "bad_records_skipped",
)


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
    """

    reader: DocumentReader
    sequence: SequenceSettings
    budget: Budget
    count_targets: bool = False
    pad_to_multiple_of: int = 1
    num_workers: int = 0
    drop_last: bool = False


@dataclass(frozen=True)
class RowState:
    """Where one rank is, between two rows. Holds references; :meth:`to_plain` makes the containers that are saved.

    Attributes:
        epoch: of the data: how many passes are complete.
        finished: whether the epoch has no further row.
        exhausted: whether the stream has ended (the pool may still hold documents).
        rows: given in this epoch; the same on every rank.
        dp_rank: whose state this is.
        dp_size: the layout it was taken in.
        deals: of earlier layouts in this epoch.
        drawn: how many documents of its share this rank has taken from the stream.
        num_workers: of the stream's snapshot.
        stream: snapshot of the loader; None if there is none for this layout.
        candidates: the pool, oldest first.
        policy: what the policy remembers.
        counters: what was read, packed, dropped since the run began.
    """

    epoch: int = 0
    finished: bool = False
    exhausted: bool = False
    rows: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    deals: tuple[Deal, ...] = ()
    drawn: int = 0
    num_workers: int = 0
    stream: dict[str, Any] | None = None
    candidates: tuple[Candidate, ...] = ()
    policy: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def at_end(self, counters: dict[str, int]) -> RowState:
        """This state, once it is known that no row follows. What is left over is counted, and not kept."""
        return replace(self, finished=True, candidates=(), stream=None, counters=counters)

    def next_epoch(self) -> RowState:
        """The start of the following epoch; only the counters go on."""
        return RowState(self.epoch + 1, dp_rank=self.dp_rank, dp_size=self.dp_size, counters=self.counters)

    def to_plain(self, by_value: Sequence[bool]) -> dict[str, Any]:
        """Plain containers and tensors.

        Args:
            by_value: for each source id, whether waiting documents are stored whole.
        """
        plain = {**vars(self), "deals": [list(deal.drawn) for deal in self.deals], "counters": dict(self.counters)}
        plain["candidates"] = candidates_to_state(self.candidates, by_value)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RowState:
        """The inverse of :meth:`to_plain`."""
        deals = tuple(Deal(tuple(drawn)) for drawn in plain["deals"])
        return cls(**{**plain, "deals": deals, "candidates": candidates_from_state(plain["candidates"])})

    @staticmethod
    def redeal(states: Sequence[RowState], dp_rank: int, dp_size: int) -> RowState:
        """What remains of a run on ``len(states)`` ranks, for one rank of another number: none lost, none twice.

        Args:
            states: of all former data-parallel ranks, by rank.
            dp_rank: the present rank.
            dp_size: the present number.
        """
        first = states[0]
        waiting = chain.from_iterable(zip_longest(*(state.candidates for state in states)))  # the oldest of each first
        candidates = [candidate for candidate in waiting if candidate is not None]
        counters = sum((Counter(state.counters) for state in states), Counter[str]()) if dp_rank == 0 else {}
        return RowState(
            epoch=first.epoch,
            finished=first.finished,
            exhausted=all(state.exhausted for state in states),
            rows=first.rows,
            dp_rank=dp_rank,
            dp_size=dp_size,
            deals=(*first.deals, Deal(tuple(state.drawn for state in states))),
            candidates=tuple(candidates[dp_rank::dp_size]),
            counters=dict(counters),
        )


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
        self._counters = Counter(state.counters)
        self._drawn = state.drawn
        self._exhausted = state.exhausted
        self._loader: Any = None
        self._draws: Iterator[Draw] | None = None
        # Another policy than the one that was saved starts afresh: the new configuration wins.
        if state.policy.get("class") == type(policy).__name__:
            policy.load_state_dict(state.policy["state"])

    def next_row(self) -> PackedBatch | None:
        """The next whole row, or None at the end of the epoch.

        Raises:
            DataError: a bad record under ``on_bad_record: error``, or a document that changed since the state was
            saved.
        """
        settings = self._settings
        budget = settings.budget
        chosen = plan_row(self._pool, self._policy, budget, self._row, self._draw)
        self._row += 1
        tokens = sum(candidate.length for candidate in chosen)
        if settings.drop_last and self._exhausted and self._pool.tokens + tokens < budget.counted:
            self.leave_over(chosen)
            return None
        if not chosen:
            return None
        documents = [self._tokens_of(candidate) for candidate in chosen]
        row = pack_documents(documents, budget.counted, settings.pad_to_multiple_of, max_tokens=budget.physical)
        self._counters["rows"] += 1
        self._counters["documents_packed"] += len(chosen)
        self._counters["tokens_packed"] += tokens
        self._counters["tokens_padding"] += row["input_ids"].numel() - tokens
        return row

    def state(self) -> RowState:
        """The state after the last row."""
        loader = self._loader
        return replace(
            self._state,
            exhausted=self._exhausted,
            drawn=self._drawn,
            num_workers=self._settings.num_workers,
            stream=self._state.stream if loader is None else loader.state_dict(),
            candidates=self._pool.candidates,
            policy={"class": type(self._policy).__name__, "state": self._policy.state_dict()},
            counters=dict(self._counters),
        )

    def leave_over(self, chosen: Sequence[Candidate] = (), row: PackedBatch | None = None) -> None:
        """Count what will not be given: the pool, and documents or a row that were taken out of it already."""
        waiting = [*chosen, *self._pool.take(range(len(self._pool)))]
        self._counters["documents_left_over"] += len(waiting)
        self._counters["tokens_left_over"] += sum(candidate.length for candidate in waiting)
        if row is not None:
            real = row["source_ids"] >= 0
            self._counters["documents_left_over"] += int((row["document_keys"][:, 0] >= 0).sum())
            self._counters["tokens_left_over"] += int(real.sum())

    def close(self) -> None:
        """End the worker processes."""
        self._draws = self._loader = None

    def _draw(self) -> list[Candidate] | None:
        if self._exhausted:
            return None
        if self._draws is None:
            self._draws = self._open()
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

    def _tokens_of(self, candidate: Candidate) -> Document:
        """The tokens of a candidate, read again if only its number was saved."""
        if candidate.document is not None:
            return candidate.document
        source = self._settings.reader.sources[candidate.source_id]
        assert isinstance(source, IndexableSource)
        draw = self._settings.reader.draw(candidate.source_id, candidate.number)
        for document in draw.documents:
            if document.start == candidate.start and len(document) == candidate.length:
                return document
        got = f"{source.describe(candidate.number)}: {draw.error or [len(document) for document in draw.documents]}"
        fix = "Resume with the same files, tokenizer and window, or start anew."
        raise DataError(f"data.sources.{source.name}", "must give the tokens it gave before the stop", got, fix)
