"""Callbacks in any order give the same run: weights, logged values, state; and all wrappers come off again."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx import callbacks as callbacks_of_the_package
from lightning_longctx.callbacks import (
    AsyncDCPCheckpoint,
    ChannelLoss,
    ExactTokenMean,
    MaxTokens,
    MoERouterHeatmap,
    RunGuard,
    TrainingMetrics,
)
from tests.callbacks.channels import BATCHES, NAMES, loader
from tests.callbacks.moe import MoEModule
from tests.callbacks.toy import MemoryLogger, ToyLM, make_trainer, run_fit

# What a clock or a disk tells.
TIMED = ("tokens_per_s", "tokens_per_s_per_device", "_s/weights", "_s/optimizer", "_age_s", "bytes")


def is_callback(name: str) -> bool:
    part = getattr(callbacks_of_the_package, name)
    return isinstance(part, type) and issubclass(part, Callback)


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


def every_callback(folder: Path) -> list[Any]:
    """One of each kind, and ChannelLoss twice."""
    guard, tokens = RunGuard(), MaxTokens(target=10**6)
    return [*callbacks(), MoERouterHeatmap(2, detail="full"), AsyncDCPCheckpoint(folder, 2), tokens, guard]


# Each callback before and after each other one; all 40,320 orders would take hours.
ORDERS = [
    tuple(order[(start + place) % 8] for place in range(8))
    for order in (range(8), range(7, -1, -1), (0, 5, 2, 7, 4, 1, 6, 3))
    for start in range(8)
]


def run_every(order: tuple[int, ...], folder: Path) -> dict[str, Any]:
    chosen, module = every_callback(folder / "saved"), MoEModule("non-reentrant", lr=0.1)
    logger = MemoryLogger()
    settings: Any = {"default_root_dir": folder, "accumulate_grad_batches": 2, "logger": logger}
    trainer = make_trainer([chosen[index] for index in order], **settings, enable_checkpointing=True)
    trainer.fit(module, loader(BATCHES), loader(BATCHES))
    rows: dict[int | None, dict[str, float]] = {}
    for step, values in logger.rows:
        rows.setdefault(step, {}).update({key: value for key, value in values.items() if not key.endswith(TIMED)})
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())
    return {
        "rows": rows,
        "weights": [parameter.detach().tolist() for parameter in module.parameters()],
        "windows": chosen[4].state_dict()["history"]["extremes"].tolist(),
        "saved": sorted(path.name[: len("step-00000000")] for path in (folder / "saved").rglob("step-*")),
    }


@pytest.fixture(scope="module")
def usual_of_every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_every(tuple(range(8)), tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_any_order_of_all_callbacks_gives_the_same_run(
    usual_of_every: dict[str, Any], order: tuple[int, ...], tmp_path: Path
) -> None:
    assert run_every(order, tmp_path) == usual_of_every


def test_the_orders_are_those_of_all_callbacks(usual_of_every: dict[str, Any], tmp_path: Path) -> None:
    pairs = {(a, b) for order in ORDERS for place, a in enumerate(order) for b in order[place + 1 :]}
    assert len(pairs) == 8 * 7
    assert {type(one).__name__ for one in every_callback(tmp_path)} == {
        name for name in callbacks_of_the_package.__all__ if is_callback(name)
    }
    keys = {key.partition("/")[0] for row in usual_of_every["rows"].values() for key in row}
    assert keys >= {"train", "val", "channel_loss", "position_loss", "val_channel_loss", "moe", "checkpoint"}
