"""Losses by document, on one rank and on shards, and steps whose loss stands out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.callbacks.document_losses import DocumentLoss, RowLosses, document_sums, worst_documents
from lightning_longctx.callbacks.loss_history import LossHistory
from lightning_longctx.callbacks.step_sums import Field
from lightning_longctx.topology import Topology
from tests.callbacks.toy import make_batch


def _row(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    batch = make_batch(seed, 9)
    losses = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed))
    return batch, losses.masked_fill(batch["shift_labels"] == IGNORE_INDEX, 0.0)


def _by_hand(batch: dict[str, Tensor], losses: Tensor) -> list[tuple[float, int]]:
    bounds = batch["cu_seqlens"].tolist()
    found = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        targets = [i for i in range(start, end) if batch["shift_labels"][0, i] != IGNORE_INDEX]
        found.append((sum(losses[0, i].item() for i in targets), len(targets)))
    return found


@pytest.mark.parametrize("shards", [1, 2, 4], ids=str)
def test_sums_are_those_of_a_plain_loop_and_shards_add_up(shards: int) -> None:
    batch, losses = _row()
    parts = zip(losses.chunk(shards, 1), batch["shift_labels"].chunk(shards, 1), strict=True)
    sums = sum(document_sums(part, labels, batch["cu_seqlens"], rank) for rank, (part, labels) in enumerate(parts))
    assert isinstance(sums, Tensor)
    for column, (loss, targets) in zip(sums.T.tolist(), _by_hand(batch, losses), strict=True):
        assert column == pytest.approx([loss, targets], rel=1e-5)


def test_a_loss_without_a_number_stays_in_its_document() -> None:
    batch, losses = _row()
    losses[0, 1] = math.nan
    sums = document_sums(losses, batch["shift_labels"], batch["cu_seqlens"], 0)
    assert sums[0].isnan().tolist() == [True, False, False]


def test_the_worst_come_first_and_those_without_a_number_before_all() -> None:
    keys = torch.tensor([[0, 4], [1, 5], [0, 6], [-1, -1], [1, 9]])
    sums = torch.tensor([[6.0, math.nan, 5.0, 0.0, 0.0], [3.0, 2.0, 1.0, 0.0, 0.0]])
    worst = worst_documents([RowLosses(keys, sums)], Topology(), 5)
    assert [(d.source_id, d.number, d.targets) for d in worst] == [(1, 5, 2), (0, 6, 1), (0, 4, 3)]
    assert math.isnan(worst[0].loss)
    assert worst[1:] == [DocumentLoss(0, 6, 5.0, 1), DocumentLoss(0, 4, 2.0, 3)]
    assert len(worst_documents([RowLosses(keys, sums)] * 3, Topology(), 2)) == 2
    assert worst_documents([], Topology(), 5) == []


def _sums(loss: float, targets: int = 10) -> Tensor:
    sums = torch.zeros(len(Field), dtype=torch.float64)
    sums[Field.LOSS], sums[Field.TARGETS] = loss * targets, targets
    return sums


def _history(losses: list[float], factor: float = 1.5) -> LossHistory:
    history = LossHistory(factor)
    for step, loss in enumerate(losses, 1):
        history.add(step, _sums(loss))
    return history


def test_the_highest_spike_of_a_look_is_told() -> None:
    history = _history([3.0] * 25 + [4.6, 5.0, 4.7, 3.0])
    trouble = history.look()
    assert trouble is not None
    assert (trouble.step, trouble.place, trouble.loss, trouble.usual) == (27, -3, 5.0, 3.0)
    assert str(trouble) == "is 5, where 3 is usual"
    assert history.look() is None
    history.add(30, _sums(4.4))
    assert history.look() is None  # below 1.5 x 3


def test_falling_and_noisy_losses_are_no_trouble() -> None:
    falling = [11 * 0.95**step for step in range(100)]
    noisy = [2.0 + 0.3 * math.sin(step) for step in range(100)]
    assert _history(falling).look() is None
    assert _history(noisy).look() is None


def test_the_first_steps_may_jump() -> None:
    assert _history([1.0] * 19 + [9.0]).look() is None


def test_the_first_loss_without_a_number_is_told_once() -> None:
    history = _history([2.0, math.inf, math.nan, math.nan])
    trouble = history.look()
    assert trouble is not None
    assert (trouble.step, trouble.loss, trouble.is_nan) == (2, math.inf, True)
    history.add(5, _sums(math.nan))
    assert history.look() is None


def test_steps_without_targets_say_nothing_and_means_count() -> None:
    history = _history([2.0] * 30)
    history.add(31, _sums(0.0, targets=0))
    means = torch.zeros(len(Field), dtype=torch.float64)
    means[Field.MEANS], means[Field.MEANS_COUNT] = 12.0, 2.0
    history.add(32, means)
    trouble = history.look()
    assert trouble is not None
    assert (trouble.step, trouble.loss) == (32, 6.0)
