"""The sums of a step: what counts, exactly, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx.callbacks.step_sums import (
    Field,
    StepSums,
    count_source_tokens,
    count_step_targets,
    has_loss,
    mean_loss,
)
from tests.callbacks.toy import DIVISOR, TOKENS, make_batch

CPU = torch.device("cpu")


def test_packed_micro_batches_add_up() -> None:
    sums = StepSums(CPU)
    for seed, targets in enumerate([3, 0, 9]):
        losses = torch.full((1, TOKENS), 0.5) * (make_batch(seed, targets)["shift_labels"] != -100)
        assert sums.add({"loss": torch.tensor(9.9), "per_token_loss": losses}, make_batch(seed, targets))
    assert sums.values[Field.LOSS] == 6.0
    assert sums.values[Field.TARGETS] == 12
    assert sums.values[Field.TOKENS] == 3 * (TOKENS - 3)
    assert sums.values[Field.BUDGET] == 3 * DIVISOR
    assert mean_loss(sums.values.tolist()) == 0.5


def test_counts_are_exact_beyond_float32() -> None:
    sums = StepSums(CPU)
    batch = make_batch(0, 1) | {"loss_divisor": 2**24}
    losses = torch.zeros(1, TOKENS)
    sums.add({"per_token_loss": losses}, batch)
    sums.add({"per_token_loss": losses}, batch | {"loss_divisor": 1})
    assert int(sums.values[Field.BUDGET]) == 2**24 + 1
    assert int(sums.values[Field.BUDGET].float()) == 2**24  # what float32 would have counted


def test_losses_keep_no_graph() -> None:
    sums = StepSums(CPU)
    losses = torch.ones(1, TOKENS, requires_grad=True) * 2
    sums.add({"loss": losses.sum(), "per_token_loss": losses}, make_batch(0, 4))
    assert not sums.values.requires_grad


@pytest.mark.parametrize("output", [{"loss": torch.tensor(1.5)}, torch.tensor(1.5)], ids=["mapping", "tensor"])
def test_without_token_losses_means_are_averaged(output: Any) -> None:
    sums = StepSums(CPU)
    assert not sums.add(output, make_batch(0, 3), accumulate=4)
    assert not sums.add(torch.tensor(0.5), make_batch(1, 9), accumulate=4)
    assert mean_loss(sums.values.tolist()) == 4.0
    assert sums.values[Field.TARGETS] == 12  # counted all the same


@pytest.mark.parametrize("output", [None, {}, {"predictions": torch.ones(2)}], ids=["none", "empty", "other"])
def test_a_step_that_returned_no_loss_adds_none(output: Any) -> None:
    sums = StepSums(CPU)
    assert sums.add(output, make_batch(0, 3))
    assert not has_loss(sums.values.tolist())
    sums.add({"per_token_loss": torch.ones(1, TOKENS) * 2}, make_batch(0, 3))
    assert has_loss(sums.values.tolist())
    assert mean_loss(sums.values.tolist()) == TOKENS * 2 / 3  # over the targets of the step that returned one
    assert sums.values[Field.TARGETS] == 6


def test_no_targets_give_zero() -> None:
    sums = StepSums(CPU)
    sums.add({"per_token_loss": torch.zeros(1, TOKENS)}, make_batch(0, 0))
    assert mean_loss(sums.values.tolist()) == 0.0


@pytest.mark.parametrize(
    ("batch", "targets", "tokens"),
    [
        pytest.param(
            {"labels": torch.tensor([[7, 1, -100], [7, 2, 3]]), "input_ids": torch.ones(2, 3)}, 3, 6, id="padded"
        ),
        pytest.param(
            {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, None, 3, id="mask"
        ),
        pytest.param(torch.ones(2, 3), None, None, id="tensor"),
        pytest.param({"x": torch.ones(2, 3)}, None, None, id="no_tokens"),
    ],
)
def test_other_batches(batch: Any, targets: int | None, tokens: int | None) -> None:
    assert count_step_targets(batch) == targets
    assert count_source_tokens(batch) == tokens
