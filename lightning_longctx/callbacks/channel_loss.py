"""The loss of each data source: how well the model does on it, and how much it pulls.

One mean over all sources hides that one of them has stopped learning. The parts of that mean are free: the step already
has the loss of each token, so nothing is computed twice and training is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_longctx.callbacks.batch_filter import BatchFilter
from lightning_longctx.callbacks.channel_batch import POSITION_NAMES, SOURCE_KEYS, BatchReader, TokenLosses
from lightning_longctx.callbacks.channel_report import ChannelHistory, save_plot, summary_table
from lightning_longctx.callbacks.channel_settings import ChannelOptions, check_prefix, check_settings, options_of
from lightning_longctx.callbacks.channel_sums import SlotTotals, all_reduce_totals
from lightning_longctx.callbacks.channel_values import ChannelValue, channel_metrics, channel_values
from lightning_longctx.callbacks.channel_window import MAX_LOSS_CALLS, ChannelWindow, settle
from lightning_longctx.callbacks.closing import closing_of
from lightning_longctx.callbacks.loss_hook import LossHook
from lightning_longctx.callbacks.run_metrics import log_evaluated, logger_step, own_folder
from lightning_longctx.callbacks.source_names import SafeNames, SourceTable
from lightning_longctx.topology import Topology, topology_of

__all__ = ["ChannelLoss", "ChannelOptions"]


_OPTIONS = ChannelOptions()


class ChannelLoss(Callback):
    """Log the loss of each data source, in training, validation and test, exact over all ranks.

    ==================================== ================================================================
    key                                  value over the window
    ==================================== ================================================================
    ``channel_loss/<source>``            sum of the source's token losses / number of its targets
    ``channel_loss_weighted/<source>``   the same sum / targets of all sources; these add up to the loss
    ``channel_tokens/<source>``          the source's targets
    ``channel_loss/coverage``            targets with a known source / all targets: 1 if nothing is missing
    ==================================== ================================================================

    Validation has the same with ``val_`` in front, over the whole loop (one by one for several loaders too, with
    ``/dataloader_idx_<i>``), test with ``test_``. A source without targets in the window has no value there. A target
    belongs to the source of the token that is predicted.

    The values come from the ``per_token_loss`` that the step returns, with the batch's ``shift_labels`` or ``labels``
    and source ids: one id for each token, document or row. Loss, gradients and random numbers are the same with and
    without the callback. Source ids, names and ``extra_strip_keys`` are taken out of what the module's steps get; the
    keys of a packed batch stay.

    Args:
        source_key: key of the source ids. Default None: the first present of ``channel_id``, ``source_id``,
            ``dataset_id``, ``ds_idx`` and ``source_ids`` (a packed batch's).
        source_names: names by id, a list or a mapping. Default None: those of the data module, if it has
            ``source_names``; otherwise ids 0 to 1,023, called ``source_<id>``.
        source_name_key: key of the names that go with the ids of rows or documents, for sources that nobody can list.
            Default None: no such key.
        prefix: of all keys. Default None: ``channel``, or ``position`` when grouped by position.
        every_n_steps: optimizer steps between two logs. Default None: the Trainer's ``log_every_n_steps``.
        average_over: ``step`` (default): a value is that of the logged step, and other steps do nothing;
            ``interval``: of all steps since the last log, so that rare sources show.
        group_by: ``source`` (default), or ``position``: the same by position in the document, 0-4K to over 1M.
        strict: whether a batch without source ids, or with ids that fit nothing, is an error on all ranks (at the next
            log). Default False: one warning, and the coverage shows it.
        options: see :class:`ChannelOptions`.

    Attributes:
        latest: the values of the last logged training step, by the source's own name; equal on all ranks.
        latest_validation: those of the last validation, over all loaders.
        history: losses over the logged steps, for plots.

    Raises:
        ConfigurationError: an option that cannot work.
        BatchContractError: with ``strict``, a batch whose sources cannot be told.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ChannelLoss(source_names=["web", "code"])], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        source_key: str | None = None,
        source_names: list[str] | dict[int, str] | None = None,
        source_name_key: str | None = None,
        prefix: str | None = None,
        every_n_steps: int | None = None,
        average_over: Literal["step", "interval"] = "step",
        group_by: Literal["source", "position"] = "source",
        strict: bool = False,
        options: ChannelOptions = _OPTIONS,
    ) -> None:
        super().__init__()
        check_settings(average_over, group_by, every_n_steps, source_names)
        self.source_key, self.source_name_key, self.source_names = source_key, source_name_key, source_names
        self.prefix = prefix if prefix is not None else ("channel" if group_by == "source" else "position")
        check_prefix(self.prefix)
        self.every_n_steps, self.average_over = every_n_steps, average_over
        self.group_by, self.strict = group_by, strict
        self.options = options_of(options)
        self.latest: dict[str, ChannelValue] = {}
        self.latest_validation: dict[str, ChannelValue] = {}
        self.history = ChannelHistory()
        self._topology = Topology()
        self._reader = BatchReader(SourceTable(POSITION_NAMES))
        self._keys = SafeNames(reserved=("coverage",))
        self._filter: BatchFilter | None = None
        self._hook: LossHook | None = None
        self._window: ChannelWindow | None = None
        self._restored: Mapping[str, Any] = {}
        self._steps_since = 0
        self._last_step, self._stride, self._sampled = 0, 1, False
        self._evaluated: dict[int, ChannelWindow] = {}
        self._warned = False
        self._picture: Path | None = None

    # -- set-up and state ----------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """One entry in checkpoints for each prefix."""
        return "ChannelLoss" if self.prefix == "channel" else f"ChannelLoss[{self.prefix}]"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Learn who holds which tokens and what the sources are called."""
        topology = self._topology = topology_of(trainer)
        table = self._new_table(trainer)
        for slot, name in self._reader.table.learned().items():
            table.learn(slot, name)
        self._reader = BatchReader(table, self.group_by, self.source_key, topology.sp_rank, topology.sp_size)
        self._name_keys()

    def _new_table(self, trainer: Trainer) -> SourceTable:
        if self.group_by == "position":
            return SourceTable(POSITION_NAMES)
        names: Any = self.source_names
        if names is None and self.source_key in (None, "source_ids"):
            # Asked by capability; the ids of a packed batch are places in this list.
            names = getattr(getattr(trainer, "datamodule", None), "source_names", None)
        return SourceTable(names)

    def state_dict(self) -> dict[str, Any]:
        """Return names, history and, for ``average_over: interval``, the sums since the last log over all ranks.

        Those take one all-reduce, so every rank must call it; it has no collective otherwise.
        """
        table = self._reader.table
        window: list[Any] = []
        if self._window is not None and self.average_over == "interval":
            parts = [part.copy() for part in self._window.totals]
            all_reduce_totals(parts, parts[0].counts.new_zeros(1), self._topology.token_group)
            window = [part.state_dict(table.names()) for part in parts]
        return {
            "keys": self._keys.state_dict(),
            "learned": table.learned(),
            "history": self.history.state_dict(),
            "window": window,
            "steps_since": self._steps_since,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with an earlier run's keys, history and window; sources may have come or gone."""
        self._keys.load_state_dict(state_dict["keys"])
        for slot, name in state_dict["learned"].items():
            self._reader.table.learn(int(slot), name)
        self._name_keys()
        self.history.load_state_dict(state_dict["history"])
        self._restored = state_dict

    def _name_keys(self) -> None:
        # At once, so that which source has a target first does not matter. Names that are learned get keys in turn.
        for name in () if self._reader.table.is_open else self._reader.table.names():
            self._keys(name)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep metadata from the model, and watch its loss calls if asked to."""
        self._attach(trainer, pl_module)

    # A validation inside of a fit finds it done.
    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take off what was put on, before other callbacks take off what lies below."""
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take off what was put on."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take off what was put on: Lightning may skip ``teardown`` after an error."""
        self._detach()

    def _attach(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._filter is not None:
            return
        keys = [*(SOURCE_KEYS if self.source_key is None else (self.source_key,)), *self.options.extra_strip_keys]
        if self.source_name_key is not None:
            keys.append(self.source_name_key)
        self._filter = BatchFilter(trainer.strategy, keys)
        if self.options.loss_function:
            self._hook = LossHook(pl_module)

    def _detach(self) -> None:
        if self._filter is not None:
            self._filter.close()
        if self._hook is not None:
            self._hook.close()
        self._filter = self._hook = None

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the sums, with what an earlier run had in them."""
        self._window = self._new_window(trainer)
        self._last_step, self._stride, self._picture = trainer.global_step, 1, None
        self._steps_since = int(self._restored.get("steps_since", 0))
        if self._topology.dp_rank == self._topology.sp_rank == 0:  # the sums of all ranks are continued on one
            for part, saved in zip(self._window.totals, self._restored.get("window", ()), strict=False):
                part.load_state_dict(saved, self._reader.table.names())
        self._restored = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._window is not None and pl_module.automatic_optimization:
            self._window.discard()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Decide whether this step counts, before its first micro-batch runs."""
        step = trainer.global_step
        self._sampled = self.average_over == "interval" or self._is_due(trainer, step, step + self._stride)
        if self._hook is not None:
            self._hook.start(self._sampled)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a micro-batch; at the end of a step reduce and log, if it is due."""
        assert self._window is not None
        if self._sampled:
            self._add(self._window, outputs, batch)
        previous, self._last_step = self._last_step, trainer.global_step
        if self._last_step == previous:
            return
        self._stride = self._last_step - previous
        if self._sampled:
            self._end_step(trainer, self._is_due(trainer, previous, self._last_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log an interval that is not full, print the table and write the picture."""
        if self._steps_since:
            self._log_step(trainer, max(logger_step(trainer) - 1, 0))
        self._window = None
        if not closing_of(trainer).is_open and (lines := self.closing_lines()):
            rank_zero_info("\n".join(lines))
        if not self.options.plot or not trainer.loggers:
            return
        directory = trainer.log_dir  # asks rank 0, so every rank must ask
        if self.history.losses and directory is not None and trainer.is_global_zero:
            self._picture = self.plot(own_folder(directory) / f"{self.prefix}_loss.png")

    def closing_lines(self) -> list[str]:
        """The table: printed at the end of training, or among what all parts say then (``TrainingMetrics``)."""
        shown = self.history.losses and self.options.summary
        table = [f"Loss by {self.group_by}:", *summary_table(self.history).splitlines()] if shown else []
        return table + ([f"Picture: {self._picture}"] if self._picture else [])

    def plot(self, path: str | Path) -> Path:
        """Draw the losses so far.

        Args:
            path: a ``.png``, ``.pdf`` or ``.svg`` file; its folder is made.

        Returns:
            The path.
        """
        return save_plot(Path(path), self.history, f"Loss by {self.group_by}")

    def _is_due(self, trainer: Trainer, before: int, after: int) -> bool:
        every: int = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and after // every > before // every

    def _end_step(self, trainer: Trainer, due: bool) -> None:
        assert self._window is not None
        self._window.commit()
        self._steps_since += 1
        if due or self.average_over == "step":
            self._log_step(trainer, logger_step(trainer))

    def _log_step(self, trainer: Trainer, step: int) -> None:
        assert self._window is not None
        parts = self._window.totals
        self._reduce(parts, [self._window])
        metrics: dict[str, float] = {}
        for number, part in enumerate(parts):
            metrics |= self._metrics(part, f"{self.prefix}{number + 1}" if number else self.prefix)
        self.latest = channel_values(parts[0], self._reader.table)
        self.history.add(trainer.global_step, self.latest)
        self._window.reset()
        self._steps_since = 0
        # Not by `self.log`: it would write a source's last value again where the source has none.
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=step)

    # -- validation and test -------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a pass over the validation loaders."""
        self._evaluated = {}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Watch this batch's loss calls."""
        if self._hook is not None:
            self._hook.start(not trainer.sanity_checking)

    on_test_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch."""
        if trainer.sanity_checking:
            return
        if dataloader_idx not in self._evaluated:
            self._evaluated[dataloader_idx] = self._new_window(trainer)
        self._add(self._evaluated[dataloader_idx], outputs, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of the whole loop."""
        if not trainer.sanity_checking:
            self.latest_validation = self._log_evaluated(trainer, pl_module, len(trainer.num_val_batches), "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of the whole loop."""
        self._log_evaluated(trainer, pl_module, len(trainer.num_test_batches), "test")

    def _log_evaluated(
        self, trainer: Trainer, pl_module: LightningModule, loaders: int, stage: str
    ) -> dict[str, ChannelValue]:
        # One window for each loader on every rank, also where this rank had no batch of it.
        windows = [self._evaluated.get(loader) or self._new_window(trainer) for loader in range(loaders)]
        for window in windows:
            window.commit()
        parts = [part for window in windows for part in window.totals]
        self._reduce(parts, windows)
        calls = len(windows[0].totals)
        metrics: dict[str, float] = {}
        every_loader = [SlotTotals.sum(parts[call::calls]) for call in range(calls)]
        for call, total in enumerate(every_loader):
            prefix = f"{stage}_{self.prefix}{call + 1 if call else ''}"
            metrics |= self._metrics(total, prefix)
            for loader, part in enumerate(parts[call::calls] if loaders > 1 else ()):
                metrics |= self._metrics(part, prefix, f"/dataloader_idx_{loader}")
        log_evaluated(pl_module, metrics)
        self._evaluated = {}
        return channel_values(every_loader[0], self._reader.table)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _new_window(self, trainer: Trainer) -> ChannelWindow:
        parts = MAX_LOSS_CALLS if self.options.loss_function else 1
        device = trainer.strategy.root_device
        return ChannelWindow(self._reader, parts, device, self.source_name_key, self.options.counters)

    def _add(self, window: ChannelWindow, outputs: Any, batch: Any) -> None:
        calls: Sequence[TokenLosses] = ()
        if self._hook is not None:
            self._hook.compare()
            calls = self._hook.calls
            if self._hook.problem is not None:
                window.note(self._hook.problem)
        window.add(outputs, batch, calls)

    def _reduce(self, parts: Sequence[SlotTotals], windows: Sequence[ChannelWindow]) -> None:
        problem = settle(parts, windows, self._reader.table, self._topology.token_group)
        if problem is not None and self.strict:
            raise problem
        if problem is not None and not self._warned:
            rank_zero_warn(f"ChannelLoss does not see all targets: {problem}", category=UserWarning)
            self._warned = True

    def _metrics(self, part: SlotTotals, prefix: str, suffix: str = "") -> dict[str, float]:
        return channel_metrics(part, self._reader.table, self._keys, self.options, prefix, suffix)
