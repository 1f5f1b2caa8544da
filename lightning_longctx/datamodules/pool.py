"""The documents that wait to be packed, oldest first, and the policy's view of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.documents import Document
from lightning_longctx.datamodules.selection import PoolView

__all__ = ["Candidate", "DocumentPool", "candidates_from_state", "candidates_to_state"]


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
    """

    source_id: int
    number: int
    start: int
    length: int
    targets: int
    document: Document | None
    arrival: int = 0

    @classmethod
    def of(cls, document: Document) -> Candidate:
        """Wrap a document. Its first token is never a target, since labels are shifted inside the document."""
        length = len(document)
        labels = document.labels
        targets = length - 1 if labels is None else int((labels[1:] != IGNORE_INDEX).sum())
        return cls(document.source_id, document.number, document.start, length, targets, document)

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
        return head, tail


class DocumentPool:
    """Candidates in order of arrival. Knows nothing of policies or packing.

    Args:
        candidates: that wait already, oldest first.
        count_targets: whether a row's budget counts targets; otherwise tokens.
    """

    def __init__(self, candidates: Iterable[Candidate] = (), count_targets: bool = False) -> None:
        self._count_targets = count_targets
        self._counted = 0
        self._hold(list(candidates))

    def __len__(self) -> int:
        return len(self._candidates)

    @property
    def tokens(self) -> int:
        """Tokens of all candidates."""
        return self._tokens

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, oldest first."""
        return tuple(self._candidates)

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
            if self._count_targets:
                self._counts.append(candidate.targets)
                self._counted += candidate.targets
            else:
                self._counted = self._tokens

    def take(self, indices: Sequence[int]) -> list[Candidate]:
        """Remove and return the candidates at ``indices`` (each once), in the order of ``indices``."""
        taken = set(indices)
        assert len(taken) == len(indices)
        chosen = [self._candidates[index] for index in indices]
        self._hold([entry for index, entry in enumerate(self._candidates) if index not in taken])
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

    def _hold(self, candidates: list[Candidate]) -> None:
        self._candidates = candidates
        self._lengths = [candidate.length for candidate in candidates]
        self._arrivals = [candidate.arrival for candidate in candidates]
        self._tokens = sum(self._lengths)
        # One list for both where tokens are counted, so that it is kept once.
        self._counts = [candidate.targets for candidate in candidates] if self._count_targets else self._lengths
        self._counted = sum(self._counts)


def candidates_to_state(candidates: Sequence[Candidate], by_value: Sequence[bool]) -> dict[str, Any]:
    """Plain state of candidates: six integers each, and the tokens of those that cannot be read again.

    Args:
        candidates: oldest first.
        by_value: for each source id, whether its documents must be stored whole.

    Returns:
        ``index`` int64 ``[N, 6]`` and ``tokens``: position in ``index`` to ``[input_ids]`` or ``[input_ids, labels]``,
        int32.
    """
    rows = [[c.source_id, c.number, c.start, c.length, c.targets, c.arrival] for c in candidates]
    tokens: dict[int, list[Tensor]] = {}
    for position, candidate in enumerate(candidates):
        if by_value[candidate.source_id]:
            document = candidate.document
            assert document is not None
            arrays = [document.input_ids] if document.labels is None else [document.input_ids, document.labels]
            tokens[position] = [torch.from_numpy(array.copy()) for array in arrays]
    return {"index": torch.tensor(rows, dtype=torch.int64).reshape(-1, 6), "tokens": tokens}


def candidates_from_state(state: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The inverse of :func:`candidates_to_state`."""
    candidates = []
    for position, (source_id, number, start, length, targets, arrival) in enumerate(state["index"].tolist()):
        document = None
        if position in state["tokens"]:
            arrays = [tensor.numpy() for tensor in state["tokens"][position]]
            document = Document(source_id, number, start, *arrays)
        candidates.append(Candidate(source_id, number, start, length, targets, document, arrival))
    return tuple(candidates)
