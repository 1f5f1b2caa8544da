"""The packer: shifted inside documents, padded to the multiple, and never beyond the budget."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from lightning_longctx.batch import IGNORE_INDEX, MAX_PADDING_DOCUMENT, validate_packed_batch
from lightning_longctx.datamodules import Document, pack_documents
from lightning_longctx.datamodules.packing import assemble_row
from lightning_longctx.errors import ConfigurationError, DataError


def _document(tokens: list[int], labels: list[int] | None = None, source: int = 0, number: int = 0) -> Document:
    aligned = None if labels is None else np.array(labels, np.int32)
    return Document(source, number, 0, np.array(tokens, np.int32), aligned)


def test_the_last_token_of_a_document_does_not_learn_the_next_document() -> None:
    row = pack_documents([_document([1, 2, 3], source=1, number=5), _document([7, 8], number=9)], 8)
    assert row["input_ids"].tolist() == [[1, 2, 3, 7, 8]]
    assert row["shift_labels"].tolist() == [[2, 3, IGNORE_INDEX, 8, IGNORE_INDEX]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["source_ids"].tolist() == [[1, 1, 1, 0, 0]]
    assert row["cu_seqlens"].tolist() == [0, 3, 5]
    assert row["document_keys"].tolist() == [[1, 5], [0, 9]]
    assert (row["max_seqlen"], row["loss_divisor"]) == (3, 8)
    validate_packed_batch(row)


def test_labels_are_shifted_once_and_masked_ones_stay_masked() -> None:
    row = pack_documents([_document([5, 6, 7, 8], [IGNORE_INDEX, IGNORE_INDEX, 7, 8]), _document([9])], 8)
    assert row["shift_labels"].tolist() == [[IGNORE_INDEX, 7, 8, IGNORE_INDEX, IGNORE_INDEX]]


def test_bounds_come_from_lengths_and_not_from_an_end_token() -> None:
    row = pack_documents([_document([256, 1, 256, 2]), _document([3, 256])], 8)
    assert row["cu_seqlens"].tolist() == [0, 4, 6]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize(("length", "multiple", "padding"), [(7, 4, [1]), (8, 4, []), (9, 8, [7]), (8, 1, [])])
def test_a_row_is_padded_to_the_multiple_only(length: int, multiple: int, padding: list[int]) -> None:
    row = pack_documents([_document(list(range(length)))], 64, multiple)
    assert row["cu_seqlens"].diff().tolist() == [length, *padding]
    assert row["source_ids"][0, length:].tolist() == [-1] * sum(padding)
    assert row["document_keys"][1:].tolist() == [[-1, -1]] * len(padding)
    validate_packed_batch(row)


def test_much_padding_is_cut_into_short_documents() -> None:
    row = pack_documents([_document([1])], 3 * MAX_PADDING_DOCUMENT, 3 * MAX_PADDING_DOCUMENT)
    assert row["cu_seqlens"].diff().tolist() == [
        1,
        MAX_PADDING_DOCUMENT,
        MAX_PADDING_DOCUMENT,
        MAX_PADDING_DOCUMENT - 1,
    ]
    assert row["max_seqlen"] == MAX_PADDING_DOCUMENT
    validate_packed_batch(row)


def test_no_document_gives_a_row_without_weight() -> None:
    row = pack_documents([], 16, 4)
    assert row["input_ids"].shape == (1, 4)
    assert (row["shift_labels"] == IGNORE_INDEX).all()
    validate_packed_batch(row)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_targets_are_all_tokens_but_one_a_document(seed: int, multiple: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 31, rng.integers(1, 13)).tolist()
    budget = -(-sum(lengths) // multiple) * multiple
    row = pack_documents([_document(list(range(1, n + 1)), number=i) for i, n in enumerate(lengths)], budget, multiple)
    validate_packed_batch(row)
    assert int((row["shift_labels"] != IGNORE_INDEX).sum()) == sum(n - 1 for n in lengths)
    assert row["input_ids"].numel() <= budget
    assert (row["cu_seqlens"].diff() > 0).all()


@pytest.mark.parametrize("lengths", [[5, 4], [0], [3, 0]])
def test_what_does_not_fit_is_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="budget of 8"):
        pack_documents([_document([1] * n) for n in lengths], 8)


def test_a_budget_that_padding_would_exceed_is_refused() -> None:
    """SkyRL#2108, Megatron-Bridge#4598: padding to a multiple went beyond the budget of the row."""
    with pytest.raises(ConfigurationError, match="10 % 4 = 2"):
        pack_documents([_document([1])], 10, 4)


def test_the_other_ranks_derive_the_same_row() -> None:
    row = pack_documents([_document([1, 2, 3], source=2), _document([4], number=7)], 8, 4)
    parts = (row["input_ids"][0].int(), row["shift_labels"][0].int(), row["cu_seqlens"], row["document_keys"])
    other = assemble_row(*parts, 8)
    for key, value in row.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]  # type: ignore[literal-required]


def test_a_million_tokens_are_packed_fast() -> None:
    documents = [_document(list(range(1024))) for _ in range(1024)]
    times = []
    for _ in range(5):
        start = time.process_time()
        pack_documents(documents, 2**20, 8)
        times.append(time.process_time() - start)
    assert min(times) < 0.2  # about 10 ms of processor time
