"""The numbers that tell whether a run goes well: exact losses, speed, fill, progress, gradient norm and learning rate.

Lightning averages what a module logs over micro-batches and ranks, which is wrong as soon as these hold unequal numbers
of targets, and its throughput monitor assumes a constant batch size. Here every number comes from sums over tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_longctx.callbacks.closing import closing_of
from lightning_longctx.callbacks.flops import model_flops
from lightning_longctx.callbacks.gradient_norm import gradient_squares
from lightning_longctx.callbacks.progress_bar import hide_unknown_epochs, restore_epochs, set_length
from lightning_longctx.callbacks.run_metrics import data_metrics, log_evaluated, slowest_rank_metrics
from lightning_longctx.callbacks.run_totals import RunTotals
from lightning_longctx.callbacks.speed import Pace, Speed, device_peak
from lightning_longctx.callbacks.step_sums import Field, StepSums, has_loss, mean_loss
from lightning_longctx.callbacks.step_tally import TallyMember, tally_of
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, topology_of

__all__ = ["TrainingMetrics"]

_METHODS = {"val": "validation_step", "test": "test_step"}
_IN_PROGRESS_BAR = frozenset({"train/loss", "train/tokens_per_s", "data/source_fill", "data/wait_s_p50"})


class TrainingMetrics(Callback):
    """Log losses as exact token means over all ranks, and the progress of a run.

    ================================ ========================================================== =====================
    key                              value                                                      over
    ================================ ========================================================== =====================
    ``train/loss``                   sum of token losses / number of targets, all ranks         the logged step
    ``train/grad_norm``              2-norm of the token mean's gradients, before clipping      the logged step
    ``train/lr``                     learning rate of the optimizer's first parameter group     the logged step
    ``train/target_tokens``          targets trained on so far, all ranks                       the run, all resumes
    ``train/source_tokens``          source tokens trained on so far, all ranks                 the run, all resumes
    ``train/tokens_per_s``           source tokens of all ranks per second of training          since the last log
    ``train/tokens_per_s_per_device`` the same, divided by the number of devices                since the last log
    ``train/tflops_per_device``      10^12 operations of the model per second and device        since the last log
    ``train/mfu``                    those operations / the device's peak                       since the last log
    ``train/memory_peak_gib``        most device memory in use, the rank with most              the run
    ``data/source_fill``             source tokens / token budget of the micro-batches          since the last log
    ``data/<counter>``               what the data module counts: documents, drops, cuts        the run
    ``data/mix/<source>``            share of a source in the tokens packed so far              the run
    ``data/wait_s_p50``              median wait for a micro-batch, the slowest rank            since the last log
    ``data/wait_s_p99``              99th percentile of the same                                since the last log
    ``offload/<counter>``            what activation offload counts on this rank                the run
    ``val/loss``, ``test/loss``      token mean over all ranks and loaders                      the whole loop
    ================================ ========================================================== =====================

    With several validation loaders ``val/loss`` is the token mean over all of them and each has
    ``val/loss/dataloader_idx_<i>`` besides. Source tokens are those that are not padding. Waiting for data and writing
    checkpoints count as training time, validation does not. Batches of the sanity check never count.

    A step is the optimizer's: at each one there is a single all-reduce of a fixed-shape tensor, shared with the other
    callbacks of this package, and the numbers are read on the host only every ``Trainer(log_every_n_steps=...)`` steps.
    A step that returns no ``per_token_loss`` is answered with one warning, and its loss is the mean over micro-batches
    and ranks. A micro-batch that ``training_step`` skips by returning None counts nowhere. Keys whose numbers a run
    cannot give are left out: no loss where steps return none, no fill without ``loss_divisor``, no gradient norm where
    the strategy keeps gradients in a form of its own (FSDP 1, DeepSpeed), no operations where nothing tells the size of
    attention (:func:`~lightning_longctx.callbacks.flops.model_flops`), no utilization on a device without a known peak,
    no memory on the CPU. Once, after ten steps, a line tells tokens per second and per day.

    Progress bars show loss, tokens per second, fill and the median wait for data. Lightning's Rich bar shows no ``/-2``
    where a run has no number of epochs, and both its bars end where the run does, with accumulation and after a resume.
    At the end of a fit, also after Ctrl-C, the first rank prints closing lines: steps, tokens, time, fill and loss up
    to the last logged step, then what every part with a method ``closing_lines() -> list[str]`` has to say.

    Args:
        device_peak_tflops: peak of a device in 10^12 operations per second, dense, at the run's precision. Default
            None: from a table of data sheets (``callbacks/device_peaks.py``).

    Raises:
        ConfigurationError: a peak that is not positive.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[TrainingMetrics()], accelerator="cpu", logger=False)
    """

    def __init__(self, device_peak_tflops: float | None = None) -> None:
        super().__init__()
        if device_peak_tflops is not None and not device_peak_tflops > 0:
            fix = "Write the dense peak of one device, such as 989.4, or leave it out."
            got = device_peak_tflops
            raise ConfigurationError("callbacks.TrainingMetrics.device_peak_tflops", "must be positive", got, fix)
        self._peak = device_peak_tflops
        self._topology = Topology()
        self._tokens = TallyMember()
        self._since_log: Tensor | None = None
        self._pace: Pace | None = None
        self._begun = False
        self._speed: Speed | None = None
        self._totals: RunTotals | None = None
        self._learning_rate: float | Tensor | None = None
        self._has_gradient_norm = False
        self._evaluated: dict[int, StepSums] = {}
        self._warned = False
        self._silent: set[str] = set()  # keys that were left out, and told of

    @property
    def target_tokens(self) -> int:
        """Targets trained on so far, over all ranks and resumes. Waits for the device if a step is under way."""
        return self._tokens.seen.target_tokens

    @property
    def source_tokens(self) -> int:
        """Source tokens trained on so far, over all ranks and resumes. Waits for the device too."""
        return self._tokens.seen.source_tokens

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask who holds which tokens, at a point that every rank reaches."""
        self._topology = topology_of(trainer)
        hide_unknown_epochs(trainer)

    def state_dict(self) -> dict[str, int]:
        """Return source and target tokens: equal on every rank and in every layout, without a collective."""
        return self._tokens.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the checkpoint stopped."""
        self._tokens.load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._since_log = torch.zeros_like(self._tokens.begin(trainer).values)
        self._pace = Pace()
        self._begun = False
        peak = self._peak or device_peak(trainer.strategy.root_device, str(trainer.precision))
        self._speed = Speed(self._topology, model_flops(pl_module), peak)
        self._learning_rate, self._has_gradient_norm = None, False
        self._totals = RunTotals(self._topology.world_size, self._topology.sp_size, trainer.global_step)
        closing_of(trainer).begin()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the count of this fit."""
        assert self._totals is not None
        assert self._since_log is not None
        self._totals.add(self._since_log.tolist(), trainer.global_step, logged=False)
        self._tokens.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep the count of this fit, and say what it did if it was stopped on purpose."""
        self._tokens.abort()
        closing_of(trainer).tell(trainer, self, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say what the fit did, after everything else is over."""
        restore_epochs(trainer)
        closing_of(trainer).tell(trainer, self)

    def closing_lines(self) -> list[str]:
        """Steps, tokens, time, fill and loss of the last fit."""
        line = None if self._totals is None else self._totals.line()
        return [] if line is None else [line]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._tokens.tally is not None and pl_module.automatic_optimization:
            self._tokens.tally.forget_unfinished_step()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Give the progress bar its length, which a resume or another accumulation changes."""
        set_length(trainer, pl_module, batch_idx, first=not self._begun)
        self._begun = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Take the gradient norm (after the scaling to the token mean, before clipping) and the learning rate."""
        assert self._tokens.tally is not None
        rate = optimizer.param_groups[0]["lr"]
        self._learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
        if _shows_gradients(trainer.strategy):
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            gradient_squares(parameters, self._topology.world_size, self._tokens.tally.values[Field.GRADIENT_SQUARES])
            self._has_gradient_norm = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a micro-batch; at the end of a step log if it is due."""
        tally = self._tokens.tally
        assert tally is not None
        tally.advance(trainer, outputs, batch)
        if not tally.exact and not getattr(trainer.strategy, "applies_token_mean", False):
            self._warn_of_means("training_step", "train/loss")
        step = tally.finished
        if step is None:
            return
        assert self._since_log is not None
        assert self._pace is not None
        self._since_log += step
        if (sums := self._pace.after(step)) is not None:
            assert self._speed is not None
            rank_zero_info(self._speed.line(sums))
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector sets it, out of mypy's sight
        if every > 0 and (trainer.global_step // every > tally.previous_step // every or trainer.should_stop):
            self._log_step(trainer, pl_module, step.tolist())

    def _log_step(self, trainer: Trainer, pl_module: LightningModule, step: list[float]) -> None:
        assert self._since_log is not None
        assert self._speed is not None
        since = self._since_log.tolist()
        self._since_log.zero_()
        metrics = {"train/loss": mean_loss(step)} if has_loss(step) else {}
        if not metrics and not pl_module.automatic_optimization:  # else the step has skipped its micro-batches
            self._warn_of_silence("training_step", "train/loss")
        assert self._totals is not None
        self._totals.add(since, trainer.global_step, metrics.get("train/loss"))
        if self._has_gradient_norm:
            metrics["train/grad_norm"] = math.sqrt(step[Field.GRADIENT_SQUARES])
        if self._learning_rate is not None:
            metrics["train/lr"] = float(self._learning_rate)
        metrics |= {f"train/{name}": float(count) for name, count in self._tokens.state_dict().items() if count}
        metrics |= self._speed.metrics(since)
        if since[Field.BUDGET]:
            metrics["data/source_fill"] = since[Field.TOKENS] * self._topology.sp_size / since[Field.BUDGET]
        # Every rank has the same parts and comes here at the same step, so their collectives meet.
        metrics |= data_metrics(getattr(trainer, "datamodule", None))
        metrics |= slowest_rank_metrics(trainer, self._topology)
        of_strategy = getattr(trainer.strategy, "step_metrics", None)
        metrics |= of_strategy() if of_strategy is not None else {}
        for name, value in metrics.items():
            # In float64, since float32 ends exact counts at 2^24; on the host, since progress bars read it each batch.
            number = torch.tensor(value, dtype=torch.float64, device="cpu")
            pl_module.log(name, number, prog_bar=name in _IN_PROGRESS_BAR, on_step=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the training clock."""
        tally_of(trainer).clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the training clock."""
        tally_of(trainer).clock.resume()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a pass over the loaders."""
        self._evaluated = {}

    on_test_epoch_start = on_validation_epoch_start

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
            self._warn_of_means(_METHODS[stage], f"{stage}/loss")

    def _log_evaluated(self, trainer: Trainer, pl_module: LightningModule, loaders: int, stage: str) -> None:
        empty = StepSums(trainer.strategy.root_device)
        # One row for each loader on every rank, also where this rank had no batch of it.
        sums = torch.stack([self._evaluated.get(loader, empty).values for loader in range(loaders)])
        if self._topology.token_group is not None:
            dist.all_reduce(sums, group=self._topology.token_group)
        total = sums.sum(0).tolist()
        metrics = {f"{stage}/loss": mean_loss(total)} if has_loss(total) else {}
        if not metrics and self._evaluated:
            self._warn_of_silence(_METHODS[stage], f"{stage}/loss")
        if stage == "val" and self._totals is not None:
            self._totals.validation_loss = metrics.get("val/loss")
        if loaders > 1:
            rows = [(loader, row) for loader, row in enumerate(sums.tolist()) if has_loss(row)]
            metrics |= {f"{stage}/loss/dataloader_idx_{loader}": mean_loss(row) for loader, row in rows}
        log_evaluated(pl_module, metrics, in_progress_bar={f"{stage}/loss"})
        self._evaluated = {}

    def _warn_of_means(self, method: str, key: str) -> None:
        if not self._warned:
            rank_zero_warn(
                f"`{key}` is the mean over micro-batches of `loss`, not the token mean, because `{method}` returned no"
                " `per_token_loss` (or its batch has no `shift_labels`). Return what `causal_lm_loss` gives you.",
                category=UserWarning,
            )
        self._warned = True

    def _warn_of_silence(self, method: str, key: str) -> None:
        if key not in self._silent:
            rank_zero_warn(
                f"TrainingMetrics leaves `{key}` out, because `{method}` returned no loss. Return what `causal_lm_loss`"
                " gives you.",
                category=UserWarning,
            )
        self._silent.add(key)


def _shows_gradients(strategy: Any) -> bool:
    """Whether ``parameter.grad`` holds the gradient: whole on each rank, or as a DTensor that tells its layout.

    FSDP 1 keeps shards that look like whole gradients and DeepSpeed keeps none, so a norm of what they show would be
    wrong.
    """
    hidden = {"DeepSpeedStrategy", "FSDPStrategy"}
    return not any(base.__name__ in hidden for base in type(strategy).__mro__)
