"""``examples/reweight_by_loss.py``: DoReMi's step, and a fit in which the mix follows the losses."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from lightning_longctx.callbacks import ChannelLoss, ExactTokenMean
from lightning_longctx.datamodules import DynamicBatchingDataModule
from tests.callbacks.channels import BATCHES, NAMES, loader, per_source
from tests.callbacks.toy import ToyLM, make_trainer
from tests.helpers.scripts import load_script


def example() -> ModuleType:
    return load_script("examples/reweight_by_loss.py")


def test_one_step_of_the_mix() -> None:
    before = {"a": 0.25, "b": 0.25, "c": 0.5}
    mix = example().new_weights(before, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, 0.5, 0.3)
    grown = {"a": 0.25 * math.e, "b": 0.25, "c": 0.5}  # `b` is better than its reference, `c` was not seen
    total = sum(grown.values())
    assert mix == pytest.approx({name: 0.7 * value / total + 0.1 for name, value in grown.items()})
    assert sum(mix.values()) == pytest.approx(1)


class _Data(LightningDataModule):
    """The public face of the data module that the example uses, with rows made by hand."""

    source_names = NAMES

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, float]] = []

    def set_source_weights(self, weights: dict[str, float]) -> None:
        self.given.append(dict(weights))

    def train_dataloader(self) -> Any:
        return loader(BATCHES[:4])

    val_dataloader = train_dataloader


@pytest.mark.parametrize("order", [1, -1])
def test_the_mix_follows_the_losses(order: int) -> None:
    module = example()
    channel, data = ChannelLoss(every_n_steps=2, average_over="interval"), _Data()
    reweight = module.ReweightByLoss(channel, {"code": 3.0, "my prose": 100.0}, step_size=1.0, uniform=0.0)
    trainer = make_trainer([ExactTokenMean(), *[channel, reweight][::order]], limit_val_batches=0)
    trainer.fit(ToyLM(lr=0.0), datamodule=data)
    weights = dict.fromkeys(NAMES, 1 / 3)
    expected = []
    for window in (BATCHES[:2], BATCHES[2:4]):
        losses = {NAMES[source]: loss / count for source, (loss, count) in per_source(window).items()}
        weights = module.new_weights(weights, losses, reweight.reference, 1.0, 0.0)
        expected.append(weights)
    # In front of ChannelLoss the callback sees a value one step later; the last one comes after the run.
    assert data.given == [pytest.approx(mix, rel=1e-6) for mix in expected[: 2 if order == 1 else 1]]
    assert data.given[0]["web"] > data.given[0]["code"] > data.given[0]["my prose"]


@pytest.mark.slow
def test_the_example_runs() -> None:
    if not hasattr(DynamicBatchingDataModule, "set_source_weights"):
        pytest.skip("the data module cannot change its weights yet")
    weights = example().main(steps=8)
    assert weights.keys() == {"code", "prose"}
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["code"] != 0.5
