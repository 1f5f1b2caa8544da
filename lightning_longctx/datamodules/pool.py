"""The documents that wait to be packed, oldest first, and the policy's view of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.datamodules.documents import Document

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
    """

    source_id: int
    number: int
    start: int
    length: int
    targets: int
    document: Document | None

    @classmethod
    def of(cls, document: Document) -> Candidate:
        """Wrap a document. Its first token is never a target, since labels are shifted inside the document."""
        length = len(document)
        labels = document.labels
        targets = length - 1 if labels is None else int((labels[1:] != IGNORE_INDEX).sum())
        return cls(document.source_id, document.number, document.start, length, targets, document)


class DocumentPool:
    """Candidates in order of arrival. Knows nothing of policies or packing."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._candidates = list(candidates)
        self._lengths = [candidate.length for candidate in self._candidates]
        self._tokens = sum(self._lengths)

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

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each candidate, oldest first. Not a copy: asked for once for each document that is read."""
        return self._lengths

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Append the newest candidates."""
        for candidate in candidates:
            self._candidates.append(candidate)
            self._lengths.append(candidate.length)
            self._tokens += candidate.length

    def take(self, indices: Sequence[int]) -> list[Candidate]:
        """Remove and return the candidates at ``indices`` (each once), in the order of ``indices``."""
        taken = set(indices)
        assert len(taken) == len(indices)
        chosen = [self._candidates[index] for index in indices]
        self._candidates = [entry for index, entry in enumerate(self._candidates) if index not in taken]
        self._lengths = [candidate.length for candidate in self._candidates]
        self._tokens -= sum(candidate.length for candidate in chosen)
        return chosen


def candidates_to_state(candidates: Sequence[Candidate], by_value: Sequence[bool]) -> dict[str, Any]:
    """Plain state of candidates: five integers each, and the tokens of those that cannot be read again.

    Args:
        candidates: oldest first.
        by_value: for each source id, whether its documents must be stored whole.

    Returns:
        ``index`` int64 ``[N, 5]`` and ``tokens``: position in ``index`` to ``[input_ids]`` or ``[input_ids, labels]``,
        int32.
    """
    rows = [[c.source_id, c.number, c.start, c.length, c.targets] for c in candidates]
    tokens: dict[int, list[Tensor]] = {}
    for position, candidate in enumerate(candidates):
        if by_value[candidate.source_id]:
            document = candidate.document
            assert document is not None
            arrays = [document.input_ids] if document.labels is None else [document.input_ids, document.labels]
            tokens[position] = [torch.from_numpy(array.copy()) for array in arrays]
    return {"index": torch.tensor(rows, dtype=torch.int64).reshape(-1, 5), "tokens": tokens}


def candidates_from_state(state: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The inverse of :func:`candidates_to_state`."""
    candidates = []
    for position, (source_id, number, start, length, targets) in enumerate(state["index"].tolist()):
        document = None
        if position in state["tokens"]:
            arrays = [tensor.numpy() for tensor in state["tokens"][position]]
            document = Document(source_id, number, start, *arrays)
        candidates.append(Candidate(source_id, number, start, length, targets, document))
    return tuple(candidates)
