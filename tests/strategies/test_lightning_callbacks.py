"""Lightning's own callbacks under our strategy on two ranks, with our data module; `docs/callbacks.md` has the table.

What cannot work is refused before a process is started: test_checks.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_longctx import IGNORE_INDEX, ExactTokenMean, LongContextFSDPStrategy, TrainingMetrics
from tests.callbacks.toy import make_trainer
from tests.datamodules.helpers import data_module, records
from tests.helpers.pool import run_ranks
from tests.parity.layouts import whole
from tests.strategies.own_model import OwnModule

pytestmark = pytest.mark.distributed


class Module(OwnModule):
    """Has what callbacks ask a module for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Run:
    """What is looked at after a fit."""

    def __init__(
        self, callbacks: list[Any], devices: int, sp: int, module: Module | None = None, **settings: Any
    ) -> None:
        warnings.filterwarnings("ignore", message=".*isinstance.treespec")
        module = module or Module()
        ours = {"strategy": LongContextFSDPStrategy(sequence_parallel_size=sp)} if sp else {}
        first = TrainingMetrics() if sp else ExactTokenMean()
        self.trainer = make_trainer([first, *callbacks], devices=devices, **ours, **{"max_epochs": 3, **settings})
        data = data_module({"a": records(12)}, validation_sources={"v": records(4, seed=1)})
        self.trainer.fit(module, data)
        self.steps = self.trainer.global_step
        self.weights = {name: whole(parameter) for name, parameter in module.named_parameters()}

    def column(self, key: str) -> list[float]:
        return self.trainer.logger.column(key)  # type: ignore[union-attr]


def _early_stopping() -> tuple[int, int, float]:
    stopper = stock.EarlyStopping("val/loss", patience=1, min_delta=100.0)  # nothing is an improvement of 100
    run = Run([stopper], 2, 2)
    return run.trainer.current_epoch, stopper.stopped_epoch, float(stopper.best_score)


def test_early_stopping_ends_all_ranks_at_the_same_epoch() -> None:
    first, second = run_ranks(_early_stopping, 2)
    assert first == second
    assert first[:2] == (2, 1), "two epochs of three, numbered from 0"
    assert first[2] < 10


def _learning_rate() -> tuple[list[float], int]:
    run = Run([stock.LearningRateMonitor("step")], 2, 2, max_epochs=1)
    return run.column("lr-SGD"), run.steps


def test_learning_rate_monitor_logs_each_step() -> None:
    rates, steps = run_ranks(_learning_rate, 2)[0]
    assert rates == pytest.approx([0.1 * 0.5**step for step in range(steps)])
    assert steps > 2


def _summary(name: str) -> tuple[dict[str, int], str]:
    found: dict[str, int] = {}

    def keep(data: Any, total: int, trainable: int, *args: Any, **kwargs: Any) -> None:
        found.update(total=total, trainable=trainable)

    summary = getattr(stock, name)(max_depth=2)
    summary.summarize = keep
    run = Run([summary], 2, 2, max_steps=1, enable_model_summary=True)
    real = sum(parameter.numel() for parameter in run.weights.values())
    return found, str(real)


@pytest.mark.parametrize("name", ["ModelSummary", "RichModelSummary"])
def test_summaries_count_whole_parameters(name: str) -> None:
    found, real = run_ranks(_summary, 2, name)[0]
    assert found == {"total": int(real), "trainable": int(real)}


def _timer() -> tuple[int, bool]:
    timer = stock.Timer(duration=timedelta(seconds=0), interval="step")
    more = stock.Timer(duration=timedelta(days=1), interval="step")
    run = Run([timer], 2, 2)
    long = Run([more], 2, 2, max_epochs=1)
    return run.steps, long.steps > 2 and more.time_elapsed() > 0


def test_a_timer_ends_all_ranks() -> None:
    first, second = run_ranks(_timer, 2)
    assert first == second
    assert first[0] <= 1
    assert first[1]


def _lambda() -> list[int]:
    seen: list[int] = []
    Run([stock.LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[4]))], 2, 2, max_epochs=1)
    return seen


def test_a_lambda_callback_is_called_after_each_micro_batch() -> None:
    first, second = run_ranks(_lambda, 2)
    assert first == second == list(range(len(first)))
    assert len(first) > 2


def _device_stats() -> list[str]:
    run = Run([stock.DeviceStatsMonitor(cpu_stats=True)], 2, 2, max_epochs=1)
    rows = run.trainer.logger.rows  # type: ignore[union-attr]
    return sorted({key for _, row in rows for key in row if key.startswith("DeviceStatsMonitor")})


def test_device_stats_are_logged() -> None:
    pytest.importorskip("psutil")
    keys = run_ranks(_device_stats, 2)[0]
    assert any("cpu_vm_percent" in key for key in keys)


def _accumulation() -> Any:
    return stock.GradientAccumulationScheduler({0: 2, 1: 3, 2: 1})


def _finetuning() -> Any:
    return stock.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0)


MAKERS: dict[str, Callable[[], Any]] = {"accumulation": _accumulation, "finetuning": _finetuning}


def _train(name: str, devices: int, sp: int) -> tuple[int, dict[str, Tensor]]:
    run = Run([MAKERS[name]()], devices, sp)
    return run.steps, run.weights


@pytest.mark.parametrize("name", MAKERS)
def test_what_changes_during_a_run_trains_as_one_process_without_our_strategy(name: str) -> None:
    """The exact mean over 2, then 3 micro-batches, the last window short; and blocks that join in the second epoch."""
    steps, expected = run_ranks(_train, 1, name, 1, 0)[0]
    for found_steps, weights in run_ranks(_train, 2, name, 2, 2):
        assert found_steps == steps
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6, msg=key)
    untrained = Module().state_dict()
    assert all(not torch.equal(expected[key], untrained[key]) for key in expected)


class _Metered(Module):
    """Logs the loss of a step by a metric of torchmetrics too."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        targets = (batch["shift_labels"] != IGNORE_INDEX).sum()  # of this rank's part of the row
        self.mean(out["per_token_loss"].sum() / targets.clamp(min=1), targets)
        self.log("metered", self.mean)
        return out


def _metered(sp: int) -> tuple[list[float], list[float]]:
    run = Run([], 2, sp, max_epochs=1, module=_Metered())
    return run.column("metered"), run.column("train/loss")


@pytest.mark.parametrize("sp", [1, 2])
def test_a_metric_of_torchmetrics_joins_the_ranks(sp: int) -> None:
    """What `docs/callbacks.md` says of it: right, by a collective of its own for each of its states in each step."""
    metered, losses = run_ranks(_metered, 2, sp)[0]
    assert metered == pytest.approx(losses, rel=1e-5)
    assert len(losses) > 1


class _Writer(stock.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[int] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *more: Any) -> None:
        self.written.append(more[1])


def _predicted() -> list[int]:
    warnings.filterwarnings("ignore", message=".*Couldn't infer the batch indices")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    writer = _Writer()
    run = make_trainer([writer], devices=2, strategy=LongContextFSDPStrategy(sequence_parallel_size=2))
    run.predict(Module(), data_module({"a": records(12)}, validation_sources={"v": records(12)}))
    return writer.written


def test_a_prediction_writer_is_called_on_each_rank_for_each_row() -> None:
    first, second = run_ranks(_predicted, 2)
    assert first == second == list(range(len(first)))
    assert len(first) > 2


def _rate_finder() -> tuple[float, int, list[str]]:
    finder = stock.LearningRateFinder(num_training_steps=4, update_attr=True)
    run = Run([finder], 2, 2, max_epochs=1)
    return len(finder.optimal_lr.results["loss"]), run.steps, sorted(path.name for path in Path().glob(".lr_find*"))


def test_the_learning_rate_finder_gives_the_weights_and_the_data_back() -> None:
    losses, steps, left = run_ranks(_rate_finder, 2)[0]
    plain = run_ranks(_lambda, 2)[0]
    assert losses == 4
    assert steps == len(plain), "the run begins with its first row"
    assert left == []
