"""How Lightning opens our directories under DDP and on one device; and which strategies can be saved at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_longctx.callbacks.checkpoint_capture import optimizers_of
from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.discovery import as_checkpoint, check_one_checkpoint, is_checkpoint, reading
from lightning_longctx.checkpoint.layout import COMMIT
from lightning_longctx.checkpoint.restore import OpenCheckpoint, agree_or_raise
from lightning_longctx.errors import CheckpointError, ConfigurationError
from lightning_longctx.topology import Topology, topology_of

__all__ = ["DirectoryCheckpointIO", "check_callbacks", "check_strategy", "install_reader", "remove_reader"]

_FIELD = "callbacks.AsyncDCPCheckpoint"


class DirectoryCheckpointIO(CheckpointIO):
    """Opens checkpoint directories; leaves files to what was there before.

    Args:
        inner: for everything that is no directory of ours.
        trainer: the run; its module is built, its optimizers come later.
        open_checkpoint: opens a directory with the user's settings.
    """

    def __init__(
        self, inner: CheckpointIO, trainer: pl.Trainer, open_checkpoint: Callable[[Any], OpenCheckpoint]
    ) -> None:
        self.inner = inner
        self._trainer = trainer
        self._open = open_checkpoint
        self._opened: OpenCheckpoint | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """As before: for ``trainer.save_checkpoint`` and other callbacks."""
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: Any) -> None:
        """As before."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """As before."""
        self.inner.teardown()

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Weights and the state of the run in Lightning's form; optimizers follow once they exist."""
        given = self._trainer.strategy.broadcast(path)  # ranks must not each believe their own look
        path = as_checkpoint(given)
        if not is_checkpoint(path):
            check_one_checkpoint(path)
            return self.inner.load_checkpoint(given, weights_only=weights_only)
        error, state = None, dict[str, Any]()
        topology = topology_of(self._trainer)
        try:
            with reading(path):
                state = self._read(path, topology)
        except CheckpointError as problem:
            error = problem
        agree_or_raise(error, topology.host_group, path / COMMIT)
        return state

    def _read(self, path: Folder, topology: Topology) -> dict[str, Any]:
        opened = self._opened = self._open(path)
        if self._trainer.state.fn == TrainerFn.FITTING:
            opened.require_resumable()
        module, precision = self._trainer.lightning_module, self._trainer.precision_plugin
        if isinstance(precision, DoublePrecision):  # Lightning would convert it after loading, and so round the weights
            precision.convert_module(module)
        # A hook may rename what was saved; then Lightning compares the names, after it.
        renames = is_overridden("on_load_checkpoint", module, pl.LightningModule)
        weights = opened.full_weights(None if renames else module, module.strict_loading)
        return {**opened.run_state(topology), "state_dict": weights}

    def load_optimizers(self, checkpoint: Mapping[str, Any], otherwise: Callable[[Any], None]) -> None:
        """In place of the strategy's ``load_optimizer_state_dict``."""
        if self._opened is None:
            otherwise(checkpoint)
            return
        opened, self._opened = self._opened, None
        opened.fit_schedulers(checkpoint, [one.scheduler for one in self._trainer.lr_scheduler_configs])
        opened.load_optimizers(self._trainer.lightning_module, optimizers_of(self._trainer))


def check_strategy(trainer: pl.Trainer) -> None:
    """Refuse what could not be saved rightly.

    Raises:
        ConfigurationError: a strategy that keeps parameters in a form of its own, or ``AsyncCheckpointIO``.
    """
    strategy = trainer.strategy
    classes = {base.__name__ for base in type(strategy).__mro__}
    reads = getattr(strategy, "reads_checkpoint_directories", False)
    if not reads and (not isinstance(strategy, (DDPStrategy, SingleDeviceStrategy)) or "DeepSpeedStrategy" in classes):
        fix = "Use LongContextFSDPStrategy, DDP or one device, or Lightning's ModelCheckpoint."
        raise ConfigurationError(_FIELD, "needs parameters that it can name", type(strategy).__name__, fix)
    inner = strategy.checkpoint_io
    inner = inner.inner if isinstance(inner, DirectoryCheckpointIO) else inner
    if isinstance(inner, AsyncCheckpointIO):
        fix = "Leave that plug-in out: it removes the old checkpoint before the new one is there."
        raise ConfigurationError(_FIELD, "cannot be used together with AsyncCheckpointIO", "both", fix)


def check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks that save inside an exception, or whose state no resume could restore.

    Raises:
        ConfigurationError: such a callback.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    for one in callbacks:
        if isinstance(one, StochasticWeightAveraging):
            fix = "Use `WeightAveraging` or `EMAWeightAveraging`, which resume exactly."
            rule = "cannot be used together with a callback that puts another scheduler in place during the run"
            raise ConfigurationError(_FIELD, rule, type(one).__name__, fix)
        if isinstance(one, OnExceptionCheckpoint) or getattr(one, "save_on_exception", False):
            fix = (
                "Leave it out: it would save in the middle of a step, and wait for ranks that know of no exception;"
                " its file would then be what `last` means. Save more often instead (`every_n_train_steps`)."
            )
            rule = "cannot be used together with a callback that saves on exceptions"
            raise ConfigurationError(_FIELD, rule, type(one).__name__, fix)


def install_reader(trainer: pl.Trainer, open_checkpoint: Callable[[Any], OpenCheckpoint]) -> None:
    """Let the strategy open our directories, on this object only; nothing if it can by itself."""
    strategy = trainer.strategy
    remove_reader(trainer)
    if getattr(strategy, "reads_checkpoint_directories", False):
        return
    reader = DirectoryCheckpointIO(strategy.checkpoint_io, trainer, open_checkpoint)
    otherwise = strategy.load_optimizer_state_dict
    strategy.checkpoint_io = reader
    vars(strategy)["load_optimizer_state_dict"] = lambda checkpoint: reader.load_optimizers(checkpoint, otherwise)


def remove_reader(trainer: pl.Trainer) -> None:
    """Give the strategy back what it had. Safe to call twice."""
    strategy = trainer.strategy
    reader = strategy.checkpoint_io
    if isinstance(reader, DirectoryCheckpointIO):
        strategy.checkpoint_io = reader.inner
        vars(strategy).pop("load_optimizer_state_dict", None)
