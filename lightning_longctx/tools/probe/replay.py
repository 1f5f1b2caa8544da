"""What another policy would have done with the same documents: the code of training on recorded lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from lightning_longctx.datamodules import BufferPolicy
from lightning_longctx.datamodules.feed import CandidateFeed, Head
from lightning_longctx.datamodules.pool import Candidate
from lightning_longctx.datamodules.rows import RowSettings, RowState
from lightning_longctx.tools.probe.streams import Stream, WatchedRows, advance_together

__all__ = ["replay"]


class _Record(CandidateFeed):
    """What was read once, as candidates without tokens.

    Attributes:
        starved: whether more was asked for than the record holds.
        documents: given so far.
        seconds: that reading them took.
    """

    def __init__(self, stream: Stream) -> None:
        self._draws = deque(stream.draws)
        self._really_ends = stream.ended
        self.starved = False
        self.documents, self.seconds = 0, 0.0

    def head(self) -> Head | None:
        return self._draws[0].head if self._draws else None

    def draw(self) -> list[Candidate] | None:
        if not self._draws:
            self.starved = not self._really_ends
            return None
        draw = self._draws.popleft()
        self.documents += len(draw.entries)
        self.seconds = draw.seconds
        passes = 0 if draw.head is None else draw.head.passes
        return [Candidate(*entry, document=None, passes=passes) for entry in draw.entries]

    def fetch(self, candidates: Iterable[Candidate]) -> None:
        """There are no tokens to fetch."""


class ReplayedRows(WatchedRows):
    """Chooses from a recorded stream; has no tokens and packs nothing.

    Args:
        settings: of the recorded rows.
        policy: resolved; keeps its memory.
        stream: the record.
        dp_size: number of data-parallel ranks.
    """

    def __init__(self, settings: RowSettings, policy: BufferPolicy, stream: Stream, dp_size: int) -> None:
        self._record = _Record(stream)
        super().__init__(settings, policy, RowState(dp_rank=stream.rank, dp_size=dp_size), self._record)

    @property
    def starved(self) -> bool:
        return self._record.starved

    def plan(self) -> None:
        super().plan()
        if not self.rows:
            self.first_documents, self.first_seconds = self._record.documents, self._record.seconds

    def _make(self, index: int) -> tuple[tuple[tuple[int, int, int], ...], int]:
        chosen = self.take(index)
        documents = tuple((candidate.source_id, candidate.number, candidate.length) for candidate in chosen)
        count_targets = self.settings.count_targets
        return documents, sum(candidate.targets if count_targets else candidate.length for candidate in chosen)


def replay(
    make_policy: Callable[[], BufferPolicy], streams: Sequence[Stream], settings: RowSettings, micro_batches: int
) -> list[Stream]:
    """Choose rows of recorded streams by another policy. Nothing is read.

    A record ends where the recorded policy stopped reading. A row for which the policy would read on is not made,
    unless the documents had really ended there.

    Args:
        make_policy: makes a resolved policy for each stream.
        streams: the records of all data-parallel ranks, of one seed.
        settings: of the recorded rows.
        micro_batches: most rows to make.

    Returns:
        The rows; the time to the first one is that of reading as many documents in the recorded run.
    """
    ranks = [ReplayedRows(settings, make_policy(), stream, len(streams)) for stream in streams]
    advance_together(ranks, micro_batches)
    return [
        Stream(
            seed=stream.seed,
            rank=stream.rank,
            rows=rank.rows,
            first_documents=rank.first_documents,
            first_seconds=rank.first_seconds,
            draws=stream.draws,
            ended=rank.ended,
        )
        for rank, stream in zip(ranks, streams, strict=True)
    ]
