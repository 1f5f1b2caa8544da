"""AsyncDCPCheckpoint: saves behind training, found only if whole, resumed exactly, on any number of processes."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.nn import Module
from typing_extensions import override

from lightning_longctx.callbacks.checkpoint_io import check_callbacks, check_strategy, install_reader, remove_reader
from lightning_longctx.callbacks.checkpoint_loggers import continue_loggers
from lightning_longctx.callbacks.checkpoint_options import CheckpointOptions, check_options
from lightning_longctx.callbacks.checkpoint_report import shown
from lightning_longctx.callbacks.checkpoint_resume import (
    Resumed,
    agree_on_last,
    check_data,
    follow_accumulation,
    hide_lightnings_hint,
    realign_windows,
    renew_iterator,
    take_resumed,
)
from lightning_longctx.callbacks.checkpoint_run import CheckpointRun, RunPlan
from lightning_longctx.callbacks.checkpoint_schedule import Schedule
from lightning_longctx.checkpoint.address import Folder, as_folder, folder_of_run
from lightning_longctx.checkpoint.discovery import DEEP_BYTES, Found, find_latest, scan, verify
from lightning_longctx.checkpoint.layout import COMMIT
from lightning_longctx.checkpoint.restore import OpenCheckpoint, load_weights
from lightning_longctx.checkpoint.retention import Retention, best_first
from lightning_longctx.checkpoint.scores import read_scores
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import topology_of

__all__ = ["AsyncDCPCheckpoint"]

_OPTIONS = CheckpointOptions()


class AsyncDCPCheckpoint(ModelCheckpoint):
    """Save weights and optimizer in two slots behind training; find and resume the last complete checkpoint.

    Training waits for a copy of its state in memory and nothing else. Each slot has its own buffers, thread and group;
    a save waits only for the same slot's previous write. A checkpoint is a directory that gets its name as the last
    step of writing it, so whatever dies, whenever: the last complete one is there and is the one that is found.

    ``ckpt_path="last"``, ``"best"`` and the path of a directory work in ``fit``, ``validate``, ``test`` and
    ``predict``, under ``LongContextFSDPStrategy``, DDP and on one device. SIGTERM, Ctrl-C and SLURM's signal end the
    run after the step under way, with a save. It is a ``ModelCheckpoint`` only to be found by Lightning: it saves in
    its own way.

    Args:
        dirpath: folder of the checkpoints, on a store that all processes see: a path, or an address that fsspec knows
            (``s3://bucket/run``). Default None: ``checkpoints`` in the Trainer's ``default_root_dir``, the same at the
            next start, so that ``last`` finds it.
        every_n_train_steps: optimizer steps between saves. Default None: 50 if no other interval is given.
        optimizer_every_n_saves: the optimizer's state, twice the size of the weights, is part of the first of so many
            saves. The others are for evaluation only. Default 1: of each.
        every_n_epochs: save at the end of each so many epochs. Default None.
        train_time_interval: save when so much time has passed. Default None.
        keep_last: newest checkpoints that are kept, of those that can be resumed and of all. Default 2: one may turn
            out damaged.
        monitor: logged metric whose best checkpoints are kept as well, and are what ``best`` means. Default None: the
            newest is the best. With it each validation saves.
        mode: whether ``min`` (default) or ``max`` of it is best.
        options: see :class:`~lightning_longctx.callbacks.checkpoint_options.CheckpointOptions`.

    Raises:
        ConfigurationError: a setting that cannot work, a strategy whose parameters have no names (FSDP 1, DeepSpeed),
            or ``AsyncCheckpointIO`` besides.
        CheckpointError: a save failed (at the next step, once), or a checkpoint does not fit the run.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AsyncDCPCheckpoint("checkpoints")], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        every_n_train_steps: int | None = None,
        optimizer_every_n_saves: int = 1,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: str = "min",
        options: CheckpointOptions = _OPTIONS,
    ) -> None:
        self._given_dirpath = None if dirpath is None else folder_of_run(dirpath)
        self.options = check_options(options)
        self._retention = Retention(keep_last, options.keep_every_n_steps, options.save_top_k if monitor else 0, mode)
        self._schedule = Schedule(every_n_train_steps, every_n_epochs, train_time_interval, optimizer_every_n_saves)
        given = self._given_dirpath
        super().__init__(dirpath=None if given is None else str(given), monitor=monitor, mode=mode)
        self._run: CheckpointRun | None = None
        self._run_id: str | None = None  # of the last fit, for one that follows in the same process
        self._resumed: Resumed | None = None
        self._loggers_continued = False
        self._last: str | None = None  # what `last` found: a name, or nothing; None if nobody asked

    # -- finding -------------------------------------------------------------------------------------------------------

    @staticmethod
    def find_latest(dirpath: str | os.PathLike[str], resumable: bool = True) -> Path | str | None:
        """The newest checkpoint of a folder that verifies, a path or an address; None if there is no checkpoint.

        Args:
            dirpath: the folder.
            resumable: only those that training can go on from. False: those with weights.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
        """
        found = find_latest(dirpath, resumable)
        return None if found is None else found.path if isinstance(found.path, Path) else str(found.path)

    @staticmethod
    def load_weights(path: str | os.PathLike[str], module: Module, strict: bool = True) -> Module:
        """Load the weights of a checkpoint into a plain module, without a Trainer.

        Args:
            path: directory of the checkpoint.
            module: what was trained; ``strict=False`` for a part of it with the same names.
            strict: every name must be on both sides.
        """
        return load_weights(path, module, strict)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint by ``monitor``, or the newest with weights; empty if there is none.

        Before a trainer was met, its ``default_root_dir`` is taken to be the working folder, which is the default.
        """
        if self.dirpath is None and not Path("checkpoints").is_dir():
            rank_zero_warn("AsyncDCPCheckpoint: before a run, `best` needs `dirpath`.", category=UserWarning)
        root = as_folder(self.dirpath or "checkpoints")
        scores = read_scores(root) if self.monitor else {}
        for name in best_first(scores, scores, self._retention.mode):
            if not verify(root / name, 0):
                return str(root / name)
        found = self._look(root, resumable=False)
        return "" if found is None else str(found.path)

    @best_model_path.setter
    def best_model_path(self, value: str) -> None:
        """Lightning sets it when it starts; what counts is the folder."""

    @property
    @override
    def state_key(self) -> str:
        """Key of this callback's state."""
        return type(self).__qualname__

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        root = self._folder(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        found = self._look(root, resumable=fitting)
        self._last = "" if found is None else found.path.name
        if found is None:
            hide_lightnings_hint()
            so = "this is a fresh start" if fitting else "the model is evaluated as it is"
            rank_zero_info(f"No checkpoint in {shown(root)}: {so}.")
            return set()
        if fitting:
            assert found.commit is not None
            extra = self._open(found.path).rank_extra(0)
            continue_loggers(trainer, extra["loggers"], extra.get("logged_steps", found.commit.step))
            self._loggers_continued = True
        # Lightning compares times with other callbacks' files, and a folder of a store has none.
        return {str(found.path if isinstance(found.path, Path) else found.path / COMMIT)}

    def _look(self, root: Folder, resumable: bool) -> Found | None:
        # One process reads all data; the others are told by the strategy or find the same by the records.
        deep = 0 if getattr(rank_zero_only, "rank", 0) else DEEP_BYTES
        return find_latest(root, resumable, deep)

    def _folder(self, trainer: pl.Trainer) -> Folder:
        return folder_of_run(self._given_dirpath, trainer.default_root_dir)

    def _open(self, path: Any) -> OpenCheckpoint:
        return OpenCheckpoint(path, self.options.on_missing, self.options.trust_pickle)

    # -- the run -------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let the strategy open our directories, and agree on the folder."""
        check_strategy(trainer)
        if stage == "fit":
            check_callbacks(trainer)
            self._check_export(trainer)
        self._resumed = None  # of a fit that had nothing left to do
        install_reader(trainer, self._open)
        if self._last is not None:
            agree_on_last(trainer, self._last)
        self.dirpath = str(trainer.strategy.broadcast(str(self._folder(trainer))))

    def _check_export(self, trainer: pl.Trainer) -> None:
        """Refuse before the run what the export at its end would stumble over."""
        output = self.options.export_hf_at_end
        if output is not None and trainer.strategy.broadcast(Path(output).exists()):
            field = "callbacks.AsyncDCPCheckpoint.options.export_hf_at_end"
            raise ConfigurationError(field, "must not exist yet", repr(output), "Name another folder, or remove it.")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Nothing that the record of the checkpoint does not say."""
        return {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load: the folder says what there is."""

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take our part of a checkpoint, and fit Lightning's counts to the present number of ranks."""
        resumed = take_resumed(checkpoint)
        self._resumed = resumed if trainer.state.fn == TrainerFn.FITTING else None
        if resumed is None and self._last:
            rank_zero_warn(
                f"`ckpt_path: last` took the newer file of another callback, and not {self._last}: data and"
                " random numbers do not go on from it. Leave `save_last` of that callback out.",
                category=UserWarning,
            )
        if self._resumed is None:
            return
        check_data(trainer, self._resumed, self.options.on_missing == "warn")
        follow_accumulation(trainer, checkpoint["epoch"])
        realign_windows(checkpoint["loops"], self._resumed.commit.accumulate, trainer.accumulate_grad_batches)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the groups, allocate the buffers, take over the signals, go on with random numbers and loggers."""
        resumed, self._resumed = self._resumed, None
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it, out of mypy's sight
            return
        assert self.dirpath is not None
        plan = RunPlan(
            as_folder(self.dirpath), self.options, self._retention, self._schedule, self.monitor, topology_of(trainer)
        )
        self._run = CheckpointRun(trainer, pl_module, plan)
        self._run_id = self._run.open(resumed.commit.run if resumed is not None else self._run_id, resumed)
        if resumed is not None:
            if not self._loggers_continued:
                continue_loggers(trainer, resumed.loggers, resumed.logged_steps)
            resumed.announce(trainer)
            resumed.restore_random_numbers(plan.topology.rank)
            follow_accumulation(trainer, trainer.current_epoch)
            renew_iterator(trainer)
        self._loggers_continued = False

    def hang_report(self) -> str:
        """What a hanging run says of its saves, for :class:`~lightning_longctx.RunGuard`."""
        return "no run" if self._run is None else self._run.hang_report()

    def closing_lines(self) -> list[str]:
        """The newest checkpoint that a run can go on from, and the best one if there is a ``monitor``."""
        found = [] if self.dirpath is None else scan(self.dirpath)
        whole = [one for one in found if one.commit is not None and one.commit.resumable and not one.problem]
        if not whole:
            return []
        newest = whole[0]
        lines = [f"Checkpoint: {shown(newest.path)}; `ckpt_path: last` goes on from there."]
        best = as_folder(self.best_model_path) if self.monitor else None
        if best is not None and best.name in read_scores(best.parent):  # else it is the newest, by no score
            lines.append(f"Best by {self.monitor}: {shown(best)}")
        return lines

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of a step: hear what became of writes, obey signals, save if it is due."""
        if self._run is not None:
            self._run.after_batch()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what waited for the validation, and note its score."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.after_validation()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save at the end of an epoch if it is due, or if it is the last one."""
        if self._run is not None:
            self._run.after_epoch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end of the run, wait for all writes, and export if asked."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Wait for writes under way, within a bound; start nothing that other ranks would have to take part in."""
        self.teardown(trainer, pl_module, "fit")
        if self._run is not None:
            run, self._run = self._run, None
            run.abandon(exception)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the strategy back what it had."""
        remove_reader(trainer)
        self._loggers_continued = False
        self._last = None
