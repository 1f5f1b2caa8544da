"""A guard beside a run: a hang leaves a report and ends, and a loss that jumps names the documents behind it.

Both happen at night. A hang costs all devices until somebody looks, and the group's time limit ends it without a word
about who waited for what. A spike is often one bad file, and which one is known only while its row is at hand.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_longctx.batch import is_packed_batch
from lightning_longctx.callbacks.document_losses import DocumentLoss, RowLosses, document_sums, worst_documents
from lightning_longctx.callbacks.hang_report import document_lines, part_lines, write_report
from lightning_longctx.callbacks.loss_history import LossHistory
from lightning_longctx.callbacks.run_metrics import own_folder
from lightning_longctx.callbacks.step_tally import TallyMember
from lightning_longctx.callbacks.watchdog import Watchdog
from lightning_longctx.checkpoint.address import is_address
from lightning_longctx.errors import ConfigurationError, DivergenceError
from lightning_longctx.topology import Topology, topology_of

__all__ = ["HANG_EXIT_CODE", "RunGuard"]

#: Exit code of a process that ended itself because it hung: "try again later" in sysexits.h.
HANG_EXIT_CODE = 75

# Between two checks where the trainer never logs.
_CHECK_EVERY = 50
# Losses of documents are kept for so many steps between two checks: 32 KiB for a micro-batch of 4,096 documents.
_STEPS_KEPT = 200


class RunGuard(Callback):
    """Watch a fit for hangs, for losses that are not a number and for spikes.

    **Hang.** A thread of each rank knows the median time of a micro-batch. After ``hang_factor`` times that without
    one, or a validation batch or a save beginning, it writes ``hang_rank<rank>.txt``: the stack of each thread, the
    last exchange of the strategy and pending saves (from whatever part has a ``hang_report()``), and the documents of
    the batch. Then the process ends with exit code 75. Ranks that wait for the one that hangs write theirs too, which
    shows who is where.

    **Loss.** At each logged step (``Trainer(log_every_n_steps=...)``) the losses of all steps since the last one are
    looked at; a step above ``spike_factor`` times the median of the last 100, or not a number, is told with the
    documents of the largest mean loss over all ranks, and written to ``loss_step<step>.txt``. Other steps read nothing
    on the host. A step without ``per_token_loss`` or packed batches has its loss watched, but no documents to name.

    Args:
        dirpath: folder of the reports, on this machine. Default None: the logger's, else ``default_root_dir``;
            the working folder where that is an address.
        hang_factor: of the median time of a micro-batch. Default 10.
        hang_least_s: seconds below which nothing counts as a hang. Default 300: a blocking save or a row of slow
            documents takes longer than ten short steps. Set it above your longest save.
        end_on_hang: whether the process ends after its report. Default true: whoever started it can start it again.
        spike_factor: of the median loss. Default 1.5: far above the noise of a step. Not before 20 steps were seen.
        on_nan: ``error`` (default) ends the run, whose weights are lost; ``warn`` goes on.
        documents: how many to name. Default 5.

    Raises:
        ConfigurationError: a factor of at most 1, a time or number below 1, or an unknown ``on_nan``.
        DivergenceError: a loss is not a number, under ``on_nan: error``; at a logged step, on all ranks.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RunGuard(hang_least_s=600)], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        dirpath: str | None = None,
        hang_factor: float = 10.0,
        hang_least_s: float = 300.0,
        end_on_hang: bool = True,
        spike_factor: float = 1.5,
        on_nan: Literal["error", "warn"] = "error",
        documents: int = 5,
    ) -> None:
        super().__init__()
        _check("dirpath", not is_address(dirpath), "must be a folder of this machine", dirpath)
        _check("hang_factor", hang_factor > 1, "must be above 1", hang_factor)
        _check("hang_least_s", hang_least_s > 0, "must be positive", hang_least_s)
        _check("spike_factor", spike_factor > 1, "must be above 1", spike_factor)
        _check("on_nan", on_nan in ("error", "warn"), "must be `error` or `warn`", repr(on_nan))
        _check("documents", documents >= 1, "must be at least 1", documents)
        self._dirpath = dirpath
        self._end_on_hang = end_on_hang
        self._on_nan = on_nan
        self._documents = documents
        self._watchdog = Watchdog(hang_factor, hang_least_s, self._on_hang)
        self._losses = LossHistory(spike_factor)
        self._tokens = TallyMember()
        self._topology = Topology()
        self._folder = Path()
        self._trainer: Trainer | None = None
        self._keys: Tensor | None = None
        self._rows: list[RowLosses] = []
        self._steps: deque[list[RowLosses]] = deque(maxlen=_STEPS_KEPT)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Learn ranks and folder, at a point that every rank reaches."""
        if stage == "fit":
            self._topology = topology_of(trainer)
            self._folder = own_folder(self._dirpath or trainer.log_dir or trainer.default_root_dir)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        self._trainer, self._keys, self._rows = trainer, None, []
        self._steps.clear()
        self._losses.clear()
        self._tokens.begin(trainer)
        self._watchdog.start()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients."""
        if self._tokens.tally is not None and pl_module.automatic_optimization:
            self._tokens.tally.forget_unfinished_step()
            self._rows = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep what the batch is made of."""
        self._keys = batch["document_keys"] if is_packed_batch(batch) else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the losses of a micro-batch; look at them when a step is logged."""
        self._watchdog.beat()
        tally = self._tokens.tally
        assert tally is not None
        tally.advance(trainer, outputs, batch)
        per_token = outputs.get("per_token_loss") if isinstance(outputs, Mapping) else None
        if per_token is not None and is_packed_batch(batch):
            sums = document_sums(per_token, batch["shift_labels"], batch["cu_seqlens"], self._topology.sp_rank)
            self._rows.append(RowLosses(batch["document_keys"], sums))
        if tally.finished is None:
            return
        self._losses.add(trainer.global_step, tally.finished)
        self._steps.append(self._rows)
        self._rows = []
        every: int = trainer.log_every_n_steps or _CHECK_EVERY  # type: ignore[attr-defined]  # set by a connector
        if trainer.global_step // every > tally.previous_step // every or trainer.should_stop:
            self._look(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """A sign of life."""
        self._watchdog.touch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A sign of life."""
        self._watchdog.touch()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A sign of life."""
        self._watchdog.touch()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the last steps, and stop watching."""
        self._watchdog.stop()
        self._look(trainer)
        self._tokens.end()
        self._trainer = self._keys = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching: the run ends by itself."""
        self._watchdog.stop()
        self._tokens.abort()
        self._trainer = self._keys = None

    # -- hangs -------------------------------------------------------------------------------------------------------

    def _on_hang(self, waited: float, usual: float) -> None:
        """Write the report and end, in the watchdog's thread."""
        trainer, rank = self._trainer, self._topology.rank
        assert trainer is not None
        first = (
            f"Rank {rank} of {self._topology.world_size} has finished no micro-batch for {waited:.1f} s; the median is"
            f" {usual:.3g} s. Step {trainer.global_step:,}, micro-batch {trainer.fit_loop.total_batch_idx:,}."
        )
        path = self._folder / f"hang_rank{rank}.txt"
        print(f"RunGuard: {first} Report: {path}", file=sys.stderr, flush=True)
        callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]  # a connector sets it
        parts = [trainer.strategy, getattr(trainer, "datamodule", None), *callbacks]
        try:
            write_report(path, first, chain(part_lines(parts), document_lines(self._keys, self._source_names)))
        finally:
            if self._end_on_hang:
                # The others noticed at about the same time. One that lost its peer now would fail before its report.
                time.sleep(min(30.0, waited / 4))
                os._exit(HANG_EXIT_CODE)

    # -- losses ------------------------------------------------------------------------------------------------------

    def _look(self, trainer: Trainer) -> None:
        steps = list(self._steps)
        self._steps.clear()
        trouble = self._losses.look()
        if trouble is None:
            return
        # The losses were reduced, so every rank comes here together.
        rows = steps[trouble.place] if -trouble.place <= len(steps) else []
        worst = worst_documents(rows, self._topology, self._documents)
        text = f"RunGuard: the loss of step {trouble.step:,} {trouble}. {self._named(worst)}"
        if self._topology.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"loss_step{trouble.step}.txt").write_text(text + "\n", encoding="utf-8")
        if trouble.is_nan and self._on_nan == "error":
            fix = f"{self._named(worst)} Look at those and at the learning rate, and resume before this step."
            raise DivergenceError("train/loss", "must be a number", f"{trouble.loss} in step {trouble.step:,}", fix)
        rank_zero_warn(text, category=UserWarning)

    def _named(self, documents: list[DocumentLoss]) -> str:
        if not documents:
            return "Its documents are not known."
        names = [f"{self._describe(d.source_id, d.number)} ({d.loss:.4g} over {d.targets:,})" for d in documents]
        return f"Documents with the largest mean loss (over targets): {'; '.join(names)}."

    @property
    def _source_names(self) -> list[str]:
        return list(getattr(getattr(self._trainer, "datamodule", None), "source_names", []))

    def _describe(self, source_id: int, number: int) -> str:
        describe = getattr(getattr(self._trainer, "datamodule", None), "describe_document", None)
        return f"source {source_id}, document {number}" if describe is None else str(describe(source_id, number))


def _check(name: str, holds: bool, rule: str, got: object) -> None:
    if not holds:
        raise ConfigurationError(f"callbacks.RunGuard.{name}", rule, got, "Change it, or leave it out.")
