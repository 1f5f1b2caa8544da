"""The packed batch: what the validator accepts, and that each rule's error names key, rule and value."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx.batch import (
    IGNORE_INDEX,
    PAD_SOURCE_ID,
    TOKEN_KEYS,
    PackedBatch,
    PackedSequence,
    count_targets,
    is_packed_batch,
    model_inputs,
    validate_packed_batch,
)
from lightning_longctx.errors import BatchContractError
from tests.helpers.batches import packed_batch


@pytest.mark.parametrize(("lengths", "padding"), [([1], 0), ([3, 5], 0), ([3, 1, 4], 8), ([7], 1)])
def test_accepts_a_right_batch(lengths: list[int], padding: int) -> None:
    validate_packed_batch(packed_batch(lengths, padding=padding))


def test_accepts_each_shard() -> None:
    batch = packed_batch([3, 5], padding=4)
    for shard in range(4):
        part: dict[str, Any] = {**batch, **{key: batch[key][:, shard * 3 : shard * 3 + 3] for key in TOKEN_KEYS}}
        validate_packed_batch(part, sp_size=4)


def _one_row_less(batch: PackedBatch) -> torch.Tensor:
    return batch["document_keys"][:-1]


# Each case: key, its broken value (or a function of the batch), words of the rule, words of the value.
BREACHES = [
    ("cu_seqlens", lambda b: b["cu_seqlens"].long(), "must be int32 [D+1]", "int64 [3]"),
    ("cu_seqlens", lambda b: b["cu_seqlens"].tolist(), "must be int32 [D+1]", "list [0, 3, 8]"),
    ("cu_seqlens", lambda b: b["cu_seqlens"][None], "must be int32 [D+1]", "int32 [1, 3]"),
    ("cu_seqlens", lambda b: b["cu_seqlens"][:1], "must be int32 [D+1]", "int32 [1]"),
    ("cu_seqlens", lambda b: torch.tensor([0, 3, 3, 8]).int(), "strictly increase", "[0, 3, 3, 8]"),
    ("cu_seqlens", lambda b: torch.tensor([1, 3, 8]).int(), "must start at 0", "[1, 3, 8]"),
    ("max_seqlen", lambda b: 4, "must be the longest document", "4 where the longest document has 5"),
    ("max_seqlen", lambda b: torch.tensor(5), "must be the longest document, as an int", "tensor(5)"),
    ("document_keys", _one_row_less, "must be int64 [2, 2]", "int64 [1, 2]"),
    ("document_keys", lambda b: b["document_keys"].int(), "must be int64 [2, 2]", "int32 [2, 2]"),
    ("document_keys", lambda b: b["document_keys"].to("meta"), "must stay on the host", "meta"),
    ("loss_divisor", lambda b: 0, "must be a positive int", "0"),
    ("loss_divisor", lambda b: 8.0, "must be a positive int", "8.0"),
    ("input_ids", lambda b: b["input_ids"][0], "must be int64 [1, 8]", "int64 [8]"),
    ("input_ids", lambda b: b["input_ids"].int(), "must be int64 [1, 8]", "int32 [1, 8]"),
    ("shift_labels", lambda b: b["shift_labels"][:, :-1], "must be int64 [1, 8]", "int64 [1, 7]"),
    ("source_ids", lambda b: None, "must be int64 [1, 8]", "NoneType None"),
    ("position_ids", lambda b: torch.arange(8)[None], "must restart at 0", "3 at token 3"),
    ("shift_labels", lambda b: b["input_ids"], "must be -100 on the last token of each document", "["),
    ("shift_labels", lambda b: b["shift_labels"].clamp(max=-1), "must be token ids, or -100", "-1"),
]


@pytest.mark.parametrize(("key", "broken", "rule", "got"), BREACHES)
def test_each_error_names_key_rule_and_value(key: str, broken: Any, rule: str, got: str) -> None:
    batch: dict[str, Any] = dict(packed_batch([3, 5]))
    batch[key] = broken(batch)
    with pytest.raises(BatchContractError) as caught:
        validate_packed_batch(batch)
    error = caught.value
    assert error.field == f"batch['{key}']"
    assert rule in error.rule
    assert got in str(error.got)
    assert all(part in str(error) for part in (error.field, error.rule, str(error.got), error.fix))


@pytest.mark.parametrize("key", sorted(PackedBatch.__required_keys__))
def test_a_missing_key_is_named(key: str) -> None:
    batch: dict[str, Any] = dict(packed_batch([3, 5]))
    del batch[key]
    assert not is_packed_batch(batch)
    with pytest.raises(BatchContractError, match=rf"batch\['{key}'\]` must be present"):
        validate_packed_batch(batch)


@pytest.mark.parametrize("key", ["labels", "attention_mask"])
def test_keys_of_other_contracts_are_refused(key: str) -> None:
    batch: dict[str, Any] = {**packed_batch([3, 5]), key: torch.ones(1, 8)}
    with pytest.raises(BatchContractError, match=rf"batch\['{key}'\]` must be absent"):
        validate_packed_batch(batch)


def test_a_target_on_padding_is_refused() -> None:
    batch = packed_batch([3, 5], padding=4)
    batch["shift_labels"][0, 9] = 1
    with pytest.raises(BatchContractError, match="must be -100 on padding"):
        validate_packed_batch(batch)


def test_a_row_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(BatchContractError, match="multiple of sp_size = 3, but got 8"):
        validate_packed_batch(packed_batch([3, 5]), sp_size=3)


def test_a_whole_row_is_refused_where_a_shard_is_due() -> None:
    with pytest.raises(BatchContractError, match=r"must be int64 \[1, 4\], but got int64 \[1, 8\].*Slice the row once"):
        validate_packed_batch(packed_batch([3, 5]), sp_size=2)


def test_model_inputs_hold_nothing_else() -> None:
    batch = packed_batch([3, 5])
    inputs = model_inputs(batch)
    assert inputs.keys() == {"input_ids", "position_ids", "packed_sequence"}
    assert inputs["input_ids"] is batch["input_ids"]
    assert inputs["position_ids"] is batch["position_ids"]
    assert isinstance(inputs["packed_sequence"], PackedSequence)
    assert inputs["packed_sequence"].cu_seqlens is batch["cu_seqlens"]
    assert inputs["packed_sequence"].max_seqlen == 5


@pytest.mark.parametrize(("lengths", "padding"), [([1], 0), ([3, 5, 1], 7)])
def test_targets_are_all_tokens_but_the_last_of_each_document(lengths: list[int], padding: int) -> None:
    targets = count_targets(packed_batch(lengths, padding=padding))
    assert targets.dtype == torch.int64
    assert targets.item() == sum(length - 1 for length in lengths)


@pytest.mark.parametrize("thing", [None, 3, [1, 2], {}, {"input_ids": torch.zeros(1, 2)}])
def test_other_things_are_no_packed_batch(thing: object) -> None:
    assert not is_packed_batch(thing)


def test_constants_are_those_of_the_libraries() -> None:
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORE_INDEX
    assert PAD_SOURCE_ID < 0, "an index into source names would be silently right"
