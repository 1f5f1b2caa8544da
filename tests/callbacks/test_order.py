"""Callbacks in any order give the same run: weights, logged values, state; and all wrappers come off again."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean, TrainingMetrics
from tests.callbacks.channels import BATCHES, NAMES, loader
from tests.callbacks.toy import ToyLM, run_fit


def callbacks() -> list[Any]:
    """One of each, and ChannelLoss twice."""
    return [ExactTokenMean(), TrainingMetrics(), ChannelLoss(source_names=NAMES), ChannelLoss(group_by="position")]


def run(order: tuple[int, ...], module: ToyLM | None = None) -> dict[str, Any]:
    chosen = callbacks()
    module = module or ToyLM()
    batches = [batch | {"channel_id": batch["source_ids"]} for batch in BATCHES]
    trainer = run_fit([chosen[index] for index in order], module, batches, loader(batches), accumulate_grad_batches=2)
    assert not {"training_step", "optimizer_step", "validation_step"} & vars(trainer.strategy).keys()
    rows: dict[int, dict[str, float]] = {}
    for step, values in trainer.logger.rows:
        rows.setdefault(step, {}).update({key: value for key, value in values.items() if "tokens_per_s" not in key})
    return {
        "rows": rows,
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "latest": [chosen[index].latest for index in (2, 3)],
    }


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return run((0, 1, 2, 3))


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_any_order_gives_the_same_run(usual: dict[str, Any], order: tuple[int, ...]) -> None:
    found = run(order)
    assert found["rows"] == usual["rows"]
    assert {key.partition("/")[0] for row in found["rows"].values() for key in row} >= {
        *("train", "val", "data", "channel_loss", "position_loss", "val_channel_loss", "val_position_tokens")
    }
    assert all(torch.equal(a, b) for a, b in zip(found["weights"], usual["weights"], strict=True))
    assert found["latest"] == usual["latest"]


class _Failing(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert "channel_id" not in batch
        if batch_idx == 2:
            raise RuntimeError("a bug of the user")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_any_order_comes_off_after_an_error(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Any] = []
    monkeypatch.setattr(ToyLM, "on_train_start", lambda self: trainers.append(self.trainer), raising=False)
    with pytest.raises(RuntimeError, match="bug of the user"):
        run(order, _Failing())
    assert not {"training_step", "optimizer_step", "validation_step"} & vars(trainers[0].strategy).keys()
