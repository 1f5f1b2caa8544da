"""Rows for the proofs: made by hand from a list of documents, with unequal numbers of valid targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Document lengths of each row; every row has 48 tokens, the rest is one padding document. Some rows have few targets.
_LENGTHS = (
    [20, 9, 15],
    [48],
    [7, 7, 7, 7, 7],
    [1, 30, 11],
    [5],
    [17, 31],
    [40, 3],
    [2, 2, 2, 33],
    [24, 24],
    [13],
    [47],
    [11, 36],
)
ROW_TOKENS = 48
VOCABULARY = 64


def documents_of(row: int) -> list[torch.Tensor]:
    """The documents of row ``row``: int64 token ids of a fixed pseudo-random sequence."""
    generator = torch.Generator().manual_seed(1000 + row)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in _LENGTHS[row % len(_LENGTHS)]]


def labels_of(row: int) -> list[torch.Tensor]:
    """Labels aligned with the documents; every third row masks the first half of each, as a prompt."""
    labels = [document.clone() for document in documents_of(row)]
    if row % 3 == 1:
        for label in labels:
            label[: len(label) // 2] = -100
    return labels


def packed_row(row: int) -> dict[str, Any]:
    """Row ``row`` as a packed batch, written out token by token."""
    ids: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    bounds = [0]
    keys = []
    for number, (document, label) in enumerate(zip(documents_of(row), labels_of(row), strict=True)):
        ids += document.tolist()
        targets += [*label.tolist()[1:], -100]
        positions += range(len(document))
        sources += [number % 2] * len(document)
        bounds.append(len(ids))
        keys.append([number % 2, row * 100 + number])
    if len(ids) < ROW_TOKENS:
        padding = ROW_TOKENS - len(ids)
        ids += [0] * padding
        targets += [-100] * padding
        positions += range(padding)
        sources += [-1] * padding
        bounds.append(ROW_TOKENS)
        keys.append([-1, -1])
    return {
        "input_ids": torch.tensor([ids]),
        "shift_labels": torch.tensor([targets]),
        "position_ids": torch.tensor([positions]),
        "source_ids": torch.tensor([sources]),
        "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        "max_seqlen": max(b - a for a, b in zip(bounds, bounds[1:], strict=False)),
        "document_keys": torch.tensor(keys),
        "loss_divisor": ROW_TOKENS,
    }


class Rows:
    """Every ``size``-th row from ``rank`` on: what one data-parallel replica reads. A plain iterable."""

    def __init__(self, rank: int, size: int, count: int) -> None:
        self.rank, self.size, self.count = rank, size, count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of this replica, in order."""
        for row in range(self.rank, self.count, self.size):
            yield packed_row(row)
