"""The exact token mean under Lightning's own strategies: each step trains on the mean over all of its targets.

DDP averages the means of ranks and accumulation averages the means of micro-batches; with unequal numbers of targets
that is another loss than the one of a single process. ``LongContextFSDPStrategy`` corrects it by itself; this callback
brings the same correction to DDP and to one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.token_mean import TokenMean
from lightning_longctx.topology import topology_of

__all__ = ["ExactTokenMean"]


class ExactTokenMean(Callback):
    """Scale the gradients of each step to those of the mean over all targets of all ranks and micro-batches.

    ``training_step`` returns what :func:`lightning_longctx.causal_lm_loss` gives it: ``loss`` (the sum over this rank's
    tokens, divided by the constant ``loss_divisor``) and ``per_token_loss``. The callback counts the targets of each
    batch on the device and, after the last backward of a step and before gradient clipping, multiplies the gradients
    once by ``accumulate x ranks x loss_divisor / targets``: one all-reduce of one number per step. A short last
    accumulation window is right, a rank without targets is harmless, and clipping and float16 scaling see the true
    gradients.

    Manual optimization works with one optimizer that steps at most once in each ``training_step``; do not divide the
    loss by the number of accumulated batches there. The optimizer must be the one that ``self.optimizers()`` returns.

    Raises:
        ConfigurationError: under a strategy that applies the token mean by itself or accumulates by itself (DeepSpeed);
        with
            several optimizers; when an optimizer steps a second time without a ``training_step`` in between; in the
            first step, if the output has no ``per_token_loss`` or if its sum is not the loss.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="auto", callbacks=[ExactTokenMean()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._hooks: _StrategyHooks | None = None

    def check_strategy(self, strategy: Strategy) -> None:
        """Refuse a strategy under which the callback cannot be right. Ours asks before any process is started.

        Args:
            strategy: the Trainer's.

        Raises:
            ConfigurationError: it applies the token mean by itself, or accumulates by itself.
        """
        _refuse_strategy(strategy)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wrap the strategy's ``training_step`` and ``optimizer_step`` for a fit."""
        self._unwrap()
        if stage != "fit":
            return
        self.check_strategy(trainer.strategy)
        self._hooks = _StrategyHooks(trainer)
        self._hooks.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse several optimizers: their targets cannot be told apart."""
        if len(trainer.optimizers) > 1:
            raise ConfigurationError(
                "callbacks.ExactTokenMean",
                "needs one optimizer",
                f"{len(trainer.optimizers)}",
                "Use one optimizer with parameter groups, or leave the callback out.",
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._hooks is not None and pl_module.automatic_optimization:
            self._hooks.forget_unfinished_step()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the strategy its own methods back."""
        self._unwrap()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the strategy its own methods back: Lightning skips ``teardown`` after an error."""
        self._unwrap()

    def _unwrap(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None


class _StrategyHooks:
    """The two wrappers around a strategy's methods, and the way back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._mean = self._new_mean()
        self._training_step = trainer.strategy.training_step
        self._optimizer_step = trainer.strategy.optimizer_step
        self._wrappers = {"training_step": self._counting_step, "optimizer_step": self._scaling_step}
        self._before: dict[str, Any] = {}
        self._steps_to_scale = 0

    def _new_mean(self) -> TokenMean:
        return TokenMean(topology_of(self._trainer), owner="ExactTokenMean", required=True)

    def install(self) -> None:
        # On the object and not on its class: another trainer may use the same class without this callback.
        attributes = vars(self._trainer.strategy)
        self._before = {name: attributes[name] for name in self._wrappers if name in attributes}
        attributes.update(self._wrappers)

    def remove(self) -> None:
        attributes = vars(self._trainer.strategy)
        for name in self._wrappers:
            del attributes[name]
        attributes.update(self._before)

    def forget_unfinished_step(self) -> None:
        if self._steps_to_scale:
            self._mean, self._steps_to_scale = self._new_mean(), 0

    def _counting_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._steps_to_scale += 1
        return self._mean.training_step(lambda: self._training_step(batch, *args, **kwargs), batch)

    def _scaling_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        automatic = self._trainer.lightning_module.automatic_optimization
        # Lightning divides the loss by this in automatic optimization, and never in manual.
        accumulate = self._trainer.accumulate_grad_batches if automatic else 1

        def scaled() -> Any:
            result = closure()
            self._check_once_per_step()
            self._mean.scale_gradients(_parameters(optimizer), accumulate)
            return result

        return self._optimizer_step(optimizer, scaled, *args, **kwargs)

    def _check_once_per_step(self) -> None:
        if not self._steps_to_scale:
            raise ConfigurationError(
                "callbacks.ExactTokenMean",
                "needs a `training_step` before each step of the optimizer",
                "a second step in the same `training_step`",
                "Step the optimizer once in each `training_step`, or leave the callback out.",
            )
        self._steps_to_scale = 0


def _parameters(optimizer: Optimizer) -> Iterator[Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _refuse_strategy(strategy: Any) -> None:
    name = type(strategy).__name__
    if getattr(strategy, "applies_token_mean", False):
        raise ConfigurationError(
            "callbacks.ExactTokenMean",
            "must not be used with a strategy that applies the exact token mean by itself",
            name,
            "Remove the callback from `callbacks`.",
        )
    # DeepSpeed: gradients live in its own engine, scaled and reduced there.
    if strategy.handles_gradient_accumulation:
        raise ConfigurationError(
            "callbacks.ExactTokenMean",
            "needs a strategy that leaves gradient accumulation to Lightning",
            name,
            "Use DDP, one device or LongContextFSDPStrategy.",
        )
