"""Runs one layout for the proofs: a real ``Trainer.fit`` in each process of the pool."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_longctx import CausalLMModule, LongContextFSDPStrategy, TrainingMetrics, topology_of
from tests.helpers.trainers import quiet_trainer
from tests.parity.models import CONFIGS
from tests.parity.reference import LEARNING_RATE, MOMENTUM
from tests.parity.rows import Rows


class _Module(CausalLMModule):
    """The module of the suite with the reference's optimizer and hand-made rows."""

    def __init__(self, config: dict[str, Any], rows: int, keep_weights: dict[str, torch.Tensor]) -> None:
        super().__init__(config=config)
        self.rows, self.start_weights = rows, keep_weights

    def configure_model(self) -> None:
        fresh = self.model is None
        super().configure_model()
        if fresh:
            self.model.load_state_dict(self.start_weights)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def train_dataloader(self) -> Rows:
        topology = topology_of(self.trainer)
        return Rows(topology.dp_rank, topology.dp_size, self.rows)

    val_dataloader = train_dataloader


class _Recorder(Callback):
    """Keeps whole gradients of the first step, whole weights after the first, and logged values."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.first_weights: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            self.gradients = {n: whole(p.grad) for n, p in pl_module.model.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        metrics = trainer.callback_metrics
        if len(self.losses) < trainer.global_step and "train/loss" in metrics:
            self.losses.append(float(metrics["train/loss"]))
            self.norms.append(float(metrics["train/grad_norm"]))
        if trainer.global_step == 1 and not self.first_weights:
            self.first_weights = {n: whole(p) for n, p in pl_module.model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on this rank, from whatever sharding."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def train_layout(
    name: str,
    start_weights: dict[str, torch.Tensor],
    world: int,
    sp: int,
    accumulate: int,
    steps: int,
    clip: float | None = None,
    mutate: Any = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fit ``steps`` steps in this process of ``world`` and return what the reference returns (from rank 0).

    ``mutate`` is a context manager that breaks one part while the layout runs; ``options`` are further settings of the
    strategy.
    """
    warnings.simplefilter("ignore")
    with mutate() if mutate is not None else nullcontext():
        strategy = LongContextFSDPStrategy(sequence_parallel_size=sp, **(options or {}))
        return _train(name, start_weights, world, strategy, accumulate, steps, clip)


def _train(
    name: str,
    start_weights: dict[str, torch.Tensor],
    world: int,
    strategy: LongContextFSDPStrategy,
    accumulate: int,
    steps: int,
    clip: float | None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    recorder = _Recorder()
    rows = (world // strategy.sequence_parallel_size) * accumulate * steps
    module = _Module(CONFIGS[name], rows, start_weights)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        val_check_interval=None,
        callbacks=[TrainingMetrics(), recorder],
        log_every_n_steps=1,
    )
    trainer.fit(module)
    weights = {n: whole(p) for n, p in module.model.named_parameters()}
    validation = trainer.validate(module, verbose=False)
    result = {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "gradients": recorder.gradients,
        "first_weights": recorder.first_weights,
        "weights": weights,
        "val_loss": validation[0]["val/loss"],
        "steps": trainer.global_step,
    }
    return result if trainer.global_rank == 0 else {"losses": recorder.losses}
