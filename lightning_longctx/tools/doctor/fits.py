"""Runs a group of layouts with the real strategy: a ``Trainer.fit`` whose weights stand still.

The optimizer is SGD with a learning rate of 0, so each step of a fit is a layout of its own: the same weights, other
rows. What a step's gradients are is recorded where the optimizer would use them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_longctx.batch import PackedBatch
from lightning_longctx.callbacks import TrainingMetrics
from lightning_longctx.strategies import LongContextFSDPStrategy
from lightning_longctx.topology import topology_of

__all__ = ["Rows", "StepRecord", "fresh", "make_trainer", "replica_rows", "run_steps", "strategy_like", "whole"]


class StepRecord(NamedTuple):
    """What one step gave.

    Attributes:
        loss: the mean over its targets, as it is logged.
        gradients: whole, by parameter name, as the optimizer sees them.
    """

    loss: float
    gradients: dict[str, Tensor]


class _Recorder(Callback):
    """Keeps the gradients and the logged loss of each step."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._gradients = {
            name: whole(parameter.grad)
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None
        }

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(StepRecord(float(trainer.callback_metrics["train/loss"]), self._gradients))


class Rows:
    """An iterable without a length, as a stream of documents gives it.

    Args:
        rows: in order. As a list Lightning would take them for several loaders.
    """

    def __init__(self, rows: Sequence[PackedBatch]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self._rows)


def replica_rows(rows: Sequence[PackedBatch], trainer: pl.Trainer, start: int = 0) -> Iterable[PackedBatch]:
    """The rows that this data-parallel rank reads; asked for when the processes are connected."""
    topology = topology_of(trainer)
    return Rows(rows[start + topology.dp_rank :: topology.dp_size])


def fresh(template: pl.LightningModule, rate: float = 0.0) -> pl.LightningModule:
    """Return a copy of a module with weights from seed 0, plain SGD and no dropout.

    Args:
        template: never given to a Trainer itself.
        rate: learning rate.
    """
    module = copy.deepcopy(template)
    torch.manual_seed(0)
    module.configure_model()
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=rate)  # type: ignore[method-assign]
    assert parameters, "a module without parameters has nothing to compare"
    return module


def strategy_like(template: Strategy | str | None, sp_size: int) -> LongContextFSDPStrategy:
    """The strategy of a configuration with another sequence-parallel size, or the default one."""
    strategy = copy.deepcopy(template) if isinstance(template, LongContextFSDPStrategy) else LongContextFSDPStrategy()
    strategy.sequence_parallel_size = sp_size
    strategy.data_parallel_replicate_size = 1
    return strategy


def make_trainer(strategy: Strategy, world_size: int, accumulate: int, steps: int, *callbacks: Callback) -> pl.Trainer:
    """A Trainer that writes nothing, in float32 on CPUs."""
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        precision="32-true",
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        callbacks=[TrainingMetrics(), *callbacks],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def run_steps(
    module: pl.LightningModule,
    strategy: Strategy,
    world_size: int,
    accumulate: int,
    steps: Sequence[Sequence[PackedBatch]],
) -> list[StepRecord]:
    """Fit through the steps and return what each gave. Every process of the world calls it.

    Args:
        module: from :func:`fresh`.
        strategy: new.
        world_size: processes.
        accumulate: micro-batches of a step.
        steps: the rows of each step, over all data-parallel ranks.
    """
    recorder = _Recorder()
    trainer = make_trainer(strategy, world_size, accumulate, len(steps), recorder)
    rows = [row for step in steps for row in step]
    module.train_dataloader = lambda: replica_rows(rows, trainer)  # type: ignore[method-assign]
    module.val_dataloader = lambda: []  # type: ignore[method-assign]
    trainer.fit(module)
    return recorder.steps


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on this rank, from whatever sharding. Collective where it is sharded."""
    tensor = tensor.detach()
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.clone()
