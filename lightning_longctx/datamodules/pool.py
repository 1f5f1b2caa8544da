"""The documents that wait to be packed, in a fair order of their sources, and the policy's view of them.

Policies take what comes first and what fits, so they would give short documents sooner than long ones, and one source
sooner than another. Therefore the order of the pool is not that of arrival where there are several sources: documents
of the source of which the largest part still waits come first. Within a source it is that of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.documents import Document, Tokens
from lightning_longctx.datamodules.selection import PoolView

__all__ = ["Candidate", "DocumentPool", "candidates_from_state", "candidates_to_state"]

# Rows of tokens by which a source may be given sooner than the others, so that the packed mix is within two points
# after 50 rows. There a row is two points, and a document of up to a row adds to it. Before there is time to make up
# for it, and later there is more room; both fill rows (benchmarks/mix).
_AHEAD_FIRST, _AHEAD_NARROW, _AHEAD_LATE = 1.0, 0.3, 2.0
_NARROW_FROM = 35


@dataclass(slots=True)
class Candidate:
    """A document that waits, or the memory of one: after a resume its tokens are read again only when it is packed.

    Attributes:
        source_id: which source.
        number: which record of it.
        start: first token within the record.
        length: number of tokens.
        targets: number of tokens that will be trained on.
        document: the tokens; None until they are read again.
        arrival: how many rows of the epoch had been given when it came.
        passes: how many passes over its source were complete before it.
        record_tokens: of the whole record; 0 where this is all of it becomes ``length``.
    """

    source_id: int
    number: int
    start: int
    length: int
    targets: int
    document: Document | None
    arrival: int = 0
    passes: int = 0
    record_tokens: int = 0

    def __post_init__(self) -> None:
        self.record_tokens = self.record_tokens or self.length

    @classmethod
    def of(cls, document: Document, passes: int = 0) -> Candidate:
        """Wrap a document. Its first token is never a target, since labels are shifted inside the document."""
        length = len(document)
        labels = document.labels
        targets = length - 1 if labels is None else int((labels[1:] != IGNORE_INDEX).sum())
        whole = document.record_tokens or length
        return cls(document.source_id, document.number, document.start, length, targets, document, 0, passes, whole)

    def split(self, tokens: int) -> tuple[Candidate, Candidate]:
        """Two candidates: the first ``tokens`` tokens, and the rest. Each is a document of its own.

        Without the tokens at hand (after a resume) every position counts as a target but the first of each.
        """
        if self.document is not None:
            parts = self.document.part(0, tokens), self.document.part(tokens, self.length)
            head, tail = (Candidate.of(part) for part in parts)
        else:
            head = replace(self, length=tokens, targets=tokens - 1)
            rest = self.length - tokens
            tail = replace(self, start=self.start + tokens, length=rest, targets=rest - 1)
        head.arrival = tail.arrival = self.arrival
        head.passes = tail.passes = self.passes
        return head, tail


class DocumentPool:
    """Candidates in the order in which a policy should take them. Knows nothing of policies or packing.

    Args:
        candidates: that wait already, in the order of the pool they come from.
        count_targets: whether a row's budget counts targets; otherwise tokens.
        drawn: tokens of all candidates that ever came, by source id, those of ``candidates`` included. Default: none
            but these.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        count_targets: bool = False,
        drawn: Mapping[int, int] | None = None,
    ) -> None:
        self._count_targets = count_targets
        self._counted = 0
        self._hold(list(candidates))
        self._drawn: Counter[int] = Counter(drawn)
        if drawn is None:
            for candidate in self._candidates:
                self._drawn[candidate.source_id] += candidate.length

    def __len__(self) -> int:
        return len(self._candidates)

    def copy(self) -> DocumentPool:
        """Another pool of the same candidates."""
        return DocumentPool(self._candidates, self._count_targets, self._drawn)

    @property
    def tokens(self) -> int:
        """Tokens of all candidates."""
        return self._tokens

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, in order."""
        return tuple(self._candidates)

    @property
    def drawn(self) -> dict[int, int]:
        """Tokens of all candidates that ever came, by source id."""
        return dict(self._drawn)

    def view(self, row: int) -> PoolView:
        """What a policy may know before row number ``row``. No copy: asked for once for each document that is read."""
        return PoolView(self._lengths, self._counts, self._arrivals, row, self._tokens, self._counted)

    def add(self, candidates: Iterable[Candidate], row: int) -> None:
        """Append the newest candidates, which arrive before row number ``row``."""
        for candidate in candidates:
            candidate.arrival = row
            self._candidates.append(candidate)
            self._lengths.append(candidate.length)
            self._arrivals.append(row)
            self._tokens += candidate.length
            self._drawn[candidate.source_id] += candidate.length
            if self._count_targets:
                self._counts.append(candidate.targets)
                self._counted += candidate.targets
            else:
                self._counted = self._tokens

    def offer(self, row: int, budget: int) -> tuple[PoolView, Sequence[int]]:
        """What may go into row number ``row``: of each source as many tokens as do not give it too soon.

        A source that makes a smaller part of what waits than of what came was given sooner than the others. Documents
        that would take it too far ahead stay, even if the row is emptier for it.

        Args:
            row: its number.
            budget: tokens of a row.

        Returns:
            The view, and for each of its documents the index in the pool.
        """
        if len(self._drawn) < 2:
            return self.view(row), range(len(self))
        room = self._room(row, budget)
        kept = []
        for index, candidate in enumerate(self._candidates):
            if candidate.length <= room[candidate.source_id]:
                room[candidate.source_id] -= candidate.length
                kept.append(index)
        if not kept or len(kept) == len(self):
            return self.view(row), range(len(self))
        lengths, counts, arrivals = (
            [column[index] for index in kept] for column in (self._lengths, self._counts, self._arrivals)
        )
        return PoolView(lengths, counts, arrivals, row, sum(lengths), sum(counts)), kept

    def _room(self, row: int, budget: int) -> dict[int, float]:
        """Tokens of each source that a row may hold without giving the source too soon."""
        waiting: Counter[int] = Counter()
        for candidate in self._candidates:
            waiting[candidate.source_id] += candidate.length
        came = self._drawn.total()
        allowed = _AHEAD_FIRST
        if row >= _NARROW_FROM:
            # Two points are a row more in each 50; the slope is below that, for the longest documents' part.
            allowed = min(_AHEAD_LATE, max(_AHEAD_NARROW, (row - 60) / 60))
        room = {}
        for source, tokens in waiting.items():
            share = self._drawn[source] / came
            ahead = share * self._tokens - tokens
            room[source] = (allowed + share) * budget - ahead
        return room

    def take(self, indices: Sequence[int]) -> list[Candidate]:
        """Remove and return the candidates at ``indices`` (each once), in the order of ``indices``."""
        taken = set(indices)
        assert len(taken) == len(indices)
        chosen = [self._candidates[index] for index in indices]
        self._hold(self._fair([entry for index, entry in enumerate(self._candidates) if index not in taken]))
        return chosen

    def cut(self, gap: int, worth: int) -> Candidate | None:
        """Cut ``gap`` tokens off the beginning of the longest candidate; the rest of it keeps its place.

        Args:
            gap: tokens that are wanted.
            worth: fewest tokens for which a document is cut.

        Returns:
            The piece; None if the gap is not worth it, or no candidate is longer.
        """
        index = max(range(len(self)), key=self._lengths.__getitem__, default=None)
        if index is None or gap < max(worth, 1) or self._lengths[index] <= gap:
            return None
        whole = self._candidates[index]
        head, tail = whole.split(gap)
        self._hold([*self._candidates[:index], tail, *self._candidates[index + 1 :]])
        return head

    def _fair(self, candidates: list[Candidate]) -> list[Candidate]:
        """Order by the part of a source's tokens that waits from this document on, the largest first.

        So no source is given sooner than another, and a rare long document comes soon. Documents that arrive later go
        to the end, where this order would put them.
        """
        if len(self._drawn) < 2:
            return candidates
        waiting: Counter[int] = Counter()
        parts = []
        for candidate in reversed(candidates):
            source = candidate.source_id
            waiting[source] += candidate.length
            parts.append(waiting[source] / self._drawn[source])
        parts.reverse()
        return [candidates[index] for index in sorted(range(len(candidates)), key=lambda index: -parts[index])]

    def _hold(self, candidates: list[Candidate]) -> None:
        self._candidates = candidates
        self._lengths = [candidate.length for candidate in candidates]
        self._arrivals = [candidate.arrival for candidate in candidates]
        self._tokens = sum(self._lengths)
        # One list for both where tokens are counted, so that it is kept once.
        self._counts = [candidate.targets for candidate in candidates] if self._count_targets else self._lengths
        self._counted = sum(self._counts)


def candidates_to_state(candidates: Sequence[Candidate], by_value: Sequence[bool]) -> dict[str, Any]:
    """Plain state of candidates: eight integers each, and the tokens of those that cannot be read again.

    Args:
        candidates: oldest first.
        by_value: for each source id, whether its documents must be stored whole.

    Returns:
        ``index`` int64 ``[N, 8]`` and ``tokens``: position in ``index`` to ``[input_ids]`` or ``[input_ids, labels]``,
        as the smallest integers that hold them.
    """
    rows = [
        [c.source_id, c.number, c.start, c.length, c.targets, c.arrival, c.passes, c.record_tokens] for c in candidates
    ]
    tokens: dict[int, list[Tensor]] = {}
    for position, candidate in enumerate(candidates):
        if by_value[candidate.source_id]:
            document = candidate.document
            assert document is not None
            arrays = [document.input_ids] if document.labels is None else [document.input_ids, document.labels]
            tokens[position] = [torch.from_numpy(_compact(array)) for array in arrays]
    return {"index": torch.tensor(rows, dtype=torch.int64).reshape(-1, 8), "tokens": tokens}


def candidates_from_state(state: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The inverse of :func:`candidates_to_state`."""
    candidates = []
    for position, (source_id, number, start, length, targets, *came) in enumerate(state["index"].tolist()):
        document = None
        if position in state["tokens"]:
            arrays = [tensor.numpy().astype(np.int32) for tensor in state["tokens"][position]]
            ids, labels = (*arrays, None)[:2]
            document = Document(source_id, number, start, ids, labels, came[-1])
        candidates.append(Candidate(source_id, number, start, length, targets, document, *came))
    return tuple(candidates)


def _compact(array: Tokens) -> NDArray[Any]:
    """A copy in the smallest type: a byte tokenizer's ids need one byte, and most vocabularies more than two."""
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for kind in (np.uint8, np.int16):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return array.astype(kind)
    return array.copy()
