"""The numbers that tell whether a run goes well: exact losses, speed, fill, progress, gradient norm and learning rate.

Lightning averages what a module logs over micro-batches and ranks, which is wrong as soon as these hold unequal numbers
of targets, and its throughput monitor assumes a constant batch size. Here every number comes from sums over tokens.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_longctx.callbacks.gradient_norm import gradient_squares
from lightning_longctx.callbacks.step_sums import Field, StepSums, mean_loss
from lightning_longctx.topology import Topology, topology_of

__all__ = ["TrainingMetrics"]

_IN_PROGRESS_BAR = frozenset({"train/loss", "train/tokens_per_s", "data/source_fill"})


class TrainingMetrics(Callback):
    """Log losses as exact token means over all ranks, and the progress of a run.

    ============================ ============================================================== =====================
    key                          value                                                          over
    ============================ ============================================================== =====================
    ``train/loss``               sum of token losses / number of targets, all ranks             the logged step
    ``train/grad_norm``          2-norm after the scaling to the token mean, before clipping    the logged step
    ``train/lr``                 learning rate of the optimizer's first parameter group         the logged step
    ``train/target_tokens``      targets trained on so far, all ranks; goes on after a resume   the run
    ``train/tokens_per_s``       source tokens of all ranks per second of training              since the last log
    ``data/source_fill``         source tokens / token budget of the micro-batches, all ranks   since the last log
    ``data/<counter>``           what the data module counts: documents, drops, cuts, padding   the run
    ``offload/<counter>``        what activation offload counts on this rank, where it is on    the run
    ``val/loss``, ``test/loss``  token mean over all ranks and loaders                          the whole loop
    ============================ ============================================================== =====================

    With several validation loaders ``val/loss`` is the token mean over all of them and each has
    ``val/loss/dataloader_idx_<i>`` besides. Source tokens are those that are not padding. Waiting for data and writing
    checkpoints count as training time, validation does not. Batches of the sanity check never count.

    A step is the optimizer's: at each one there is a single all-reduce of a fixed-shape tensor, and the numbers are
    read on the host only every ``Trainer(log_every_n_steps=...)`` steps. A step that returns no ``per_token_loss`` is
    answered with one warning, and its loss is the mean over micro-batches and ranks. Keys whose numbers a run cannot
    give are left out: no fill without ``loss_divisor``, no gradient norm where the strategy keeps gradients in a form
    of its own (FSDP 1, DeepSpeed). A callback that sets ``trainer.should_stop`` at the end of a batch belongs before
    this one in ``callbacks:``, else Lightning writes the row of the last step with the numbers of the last logged one.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[TrainingMetrics()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._topology = Topology()
        self._clock = _Clock()
        self._step: StepSums | None = None
        self._since_log: Tensor | None = None
        self._targets_read = 0
        self._targets_since: Tensor | None = None
        self._learning_rate: float | Tensor | None = None
        self._has_gradient_norm = False
        self._last_step = 0
        self._evaluated: dict[int, StepSums] = {}
        self._warned = False

    @property
    def target_tokens(self) -> int:
        """Targets trained on so far, over all ranks and resumes. Waits for the device if a step is under way."""
        return self._targets_read + (0 if self._targets_since is None else round(self._targets_since.item()))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask who holds which tokens, at a point that every rank reaches."""
        self._topology = topology_of(trainer)

    def state_dict(self) -> dict[str, int]:
        """Return ``{"target_tokens": int}``: equal on every rank and in every layout, without a collective."""
        return {"target_tokens": self.target_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the checkpoint stopped."""
        self._targets_read = int(state_dict["target_tokens"])
        self._targets_since = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        device = trainer.strategy.root_device
        self._step = StepSums(device)
        self._since_log = torch.zeros_like(self._step.values)
        self._targets_read, self._targets_since = self.target_tokens, torch.zeros_like(self._step.values[0])
        self._last_step = trainer.global_step
        self._learning_rate, self._has_gradient_norm = None, False
        self._clock.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._step is not None and pl_module.automatic_optimization:
            self._step.values.zero_()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradient norm (after the scaling to the token mean, before clipping) and the learning rate."""
        assert self._step is not None
        rate = optimizer.param_groups[0]["lr"]
        self._learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
        if _shows_gradients(trainer.strategy):
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            gradient_squares(parameters, self._topology.world_size, self._step.values[Field.GRADIENT_SQUARES])
            self._has_gradient_norm = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a micro-batch; at the end of a step reduce, and log if it is due."""
        assert self._step is not None
        accumulate = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        exact = self._step.add(outputs, batch, accumulate)
        if not exact and not getattr(trainer.strategy, "applies_token_mean", False):
            self._warn_of_means("training_step", "train/loss")
        previous, self._last_step = self._last_step, trainer.global_step
        if self._last_step != previous:
            self._end_step(trainer, pl_module, previous)

    def _end_step(self, trainer: Trainer, pl_module: LightningModule, previous_step: int) -> None:
        assert self._step is not None
        assert self._since_log is not None
        assert self._targets_since is not None
        values = self._step.values
        values[Field.SECONDS] = self._clock.lap()
        self._reduce_step(values)
        self._since_log += values
        self._targets_since += values[Field.TARGETS]
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector sets it, out of mypy's sight
        if every > 0 and (trainer.global_step // every > previous_step // every or trainer.should_stop):
            self._log_step(trainer, pl_module, values.tolist())
        values.zero_()

    def _reduce_step(self, values: Tensor) -> None:
        topology = self._topology
        if topology.token_group is not None:
            dist.all_reduce(values, group=topology.token_group)
        token_ranks = topology.dp_size * topology.sp_size
        if topology.world_size > token_ranks:
            # Tensor parallelism: ranks outside the token group hold other shards of the gradients, or copies of them,
            # and have clocks of their own. Each sum over a token group is met once for each of its ranks.
            of_all_ranks = values[Field.GRADIENT_SQUARES :]
            dist.all_reduce(of_all_ranks, group=dist.group.WORLD)
            of_all_ranks /= token_ranks

    def _log_step(self, trainer: Trainer, pl_module: LightningModule, step: list[float]) -> None:
        assert self._since_log is not None
        assert self._targets_since is not None
        since = self._since_log.tolist()
        self._targets_read, _ = self.target_tokens, self._targets_since.zero_()
        metrics = {"train/loss": mean_loss(step)}
        if self._has_gradient_norm:
            metrics["train/grad_norm"] = math.sqrt(step[Field.GRADIENT_SQUARES])
        if self._learning_rate is not None:
            metrics["train/lr"] = float(self._learning_rate)
        if self._targets_read:
            metrics["train/target_tokens"] = float(self._targets_read)
        if since[Field.TOKENS]:
            # Mean over the ranks' clocks, so that the value is the same on each.
            metrics["train/tokens_per_s"] = since[Field.TOKENS] * self._topology.world_size / since[Field.SECONDS]
        if since[Field.BUDGET]:
            metrics["data/source_fill"] = since[Field.TOKENS] * self._topology.sp_size / since[Field.BUDGET]
        self._since_log.zero_()
        # Asked by capability. Every rank has the data module and comes here at the same step.
        count = getattr(getattr(trainer, "datamodule", None), "global_counters", None)
        if count is not None:
            metrics |= {f"data/{name}": float(value) for name, value in count().items()}
        of_strategy = getattr(trainer.strategy, "step_metrics", None)
        metrics |= of_strategy() if of_strategy is not None else {}
        for name, value in metrics.items():
            # In float64, since float32 ends exact counts at 2^24; on the host, since progress bars read it each batch.
            number = torch.tensor(value, dtype=torch.float64, device="cpu")
            pl_module.log(name, number, prog_bar=name in _IN_PROGRESS_BAR, on_step=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clock."""
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the training clock."""
        self._clock.resume()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a pass over the validation loaders."""
        self._evaluated = {}

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a pass over the test loaders."""
        self._evaluated = {}

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a validation batch."""
        if not trainer.sanity_checking:
            self._add_evaluated(trainer, outputs, batch, dataloader_idx, "val")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a test batch."""
        self._add_evaluated(trainer, outputs, batch, dataloader_idx, "test")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``val/loss``."""
        if not trainer.sanity_checking:
            self._log_evaluated(trainer, pl_module, len(trainer.num_val_batches), "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``test/loss``."""
        self._log_evaluated(trainer, pl_module, len(trainer.num_test_batches), "test")

    def _add_evaluated(self, trainer: Trainer, outputs: Any, batch: Any, loader: int, stage: str) -> None:
        sums = self._evaluated.setdefault(loader, StepSums(trainer.strategy.root_device))
        if not sums.add(outputs, batch):
            self._warn_of_means("validation_step" if stage == "val" else "test_step", f"{stage}/loss")

    def _log_evaluated(self, trainer: Trainer, pl_module: LightningModule, loaders: int, stage: str) -> None:
        empty = StepSums(trainer.strategy.root_device)
        # One row for each loader on every rank, also where this rank had no batch of it.
        sums = torch.stack([self._evaluated.get(loader, empty).values for loader in range(loaders)])
        if self._topology.token_group is not None:
            dist.all_reduce(sums, group=self._topology.token_group)
        metrics = {f"{stage}/loss": mean_loss(sums.sum(0).tolist())}
        if loaders > 1:
            rows = enumerate(sums.tolist())
            metrics |= {f"{stage}/loss/dataloader_idx_{loader}": mean_loss(row) for loader, row in rows}
        for name, value in metrics.items():
            # Equal on all ranks already. Lightning warns of an epoch value that it does not reduce, so it may: the
            # maximum of equal numbers is that number, where their mean could be rounded.
            pl_module.log(
                name,
                sums.new_full((), value),
                prog_bar=name == f"{stage}/loss",
                on_epoch=True,
                sync_dist=True,
                reduce_fx="max",
                add_dataloader_idx=False,
            )
        self._evaluated = {}

    def _warn_of_means(self, method: str, key: str) -> None:
        if not self._warned:
            rank_zero_warn(
                f"`{key}` is the mean over micro-batches of `loss`, not the token mean, because `{method}` returned no"
                " `per_token_loss` (or its batch has no `shift_labels`). Return what `causal_lm_loss` gives you.",
                category=UserWarning,
            )
        self._warned = True


class _Clock:
    """Wall time of training, without what lies between pause and resume. Never started: always 0."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._paused_at: float | None = None

    def start(self) -> None:
        self._mark, self._paused_at = time.perf_counter(), None

    def pause(self) -> None:
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        if self._mark is not None and self._paused_at is not None:
            self._mark += time.perf_counter() - self._paused_at
        self._paused_at = None

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        assert self._mark is not None
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds


def _shows_gradients(strategy: Any) -> bool:
    """Whether ``parameter.grad`` holds the gradient: whole on each rank, or as a DTensor that tells its layout.

    FSDP 1 keeps shards that look like whole gradients and DeepSpeed keeps none, so a norm of what they show would be
    wrong.
    """
    hidden = {"DeepSpeedStrategy", "FSDPStrategy"}
    return not any(base.__name__ in hidden for base in type(strategy).__mro__)
