"""What another policy would have done with the same documents: the code of training on recorded lengths."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_longctx.datamodules import Budget, BufferPolicy
from lightning_longctx.datamodules.choosing import plan_row
from lightning_longctx.datamodules.pool import Candidate, DocumentPool
from lightning_longctx.tools.probe.streams import Draw, Row, Stream, WatchedPolicy

__all__ = ["replay"]


def replay(policy: BufferPolicy, stream: Stream, budget: Budget, micro_batches: int, count_targets: bool) -> Stream:
    """Choose rows of a recorded stream by another policy. Nothing is read.

    A record ends where the recorded policy stopped reading. A row for which the policy would read on is not made,
    unless the documents had really ended there.

    Args:
        policy: resolved; keeps its memory, so give each stream its own.
        stream: the record.
        budget: of a row.
        micro_batches: most rows to make.
        count_targets: whether the budget counts targets.

    Returns:
        The rows; the time to the first one is that of reading as many documents in the recorded run.
    """
    source, watched, pool = _Record(stream.draws), WatchedPolicy(policy), DocumentPool((), count_targets)
    rows: list[Row] = []
    first_documents, first_seconds = 0, 0.0
    for number in range(micro_batches):
        chosen = plan_row(pool, watched, budget, number, source.draw)
        if not chosen or (source.ended and not stream.ended):
            break
        if not rows:
            first_documents, first_seconds = source.documents, source.seconds
        wait, pool_documents, pool_tokens, _ = watched.latest()
        documents = tuple((candidate.source_id, candidate.number, candidate.length) for candidate in chosen)
        counted = sum(candidate.targets if count_targets else candidate.length for candidate in chosen)
        rows.append(Row(documents, counted / budget.counted, source.ended, wait, pool_documents, pool_tokens))
    return Stream(
        seed=stream.seed,
        rank=stream.rank,
        rows=rows,
        first_documents=first_documents if rows else source.documents,
        first_seconds=first_seconds if rows else source.seconds,
        draws=stream.draws,
        ended=source.ended and stream.ended,
    )


class _Record:
    """Gives recorded documents again, without their tokens."""

    def __init__(self, draws: list[Draw]) -> None:
        self._draws: Iterator[Draw] = iter(draws)
        self.documents = 0
        self.seconds = 0.0
        self.ended = False

    def draw(self) -> list[Candidate] | None:
        draw = next(self._draws, None)
        if draw is None:
            self.ended = True
            return None
        self.documents += len(draw.entries)
        self.seconds = draw.seconds
        return [Candidate(*entry, document=None) for entry in draw.entries]
