"""What the command line adds to the closing lines of a fit: where its files are, and what ``longctx doctor`` found."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_longctx.tools.doctor.options import FOLDER
from lightning_longctx.tools.doctor.report import REPORT, model_name, parity_line
from lightning_longctx.tools.report.logs.find import is_run

__all__ = ["ClosingNotes"]


class ClosingNotes(Callback):
    """Has no part in training: it knows the folder of the run, and looks there when it is over."""

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._model = ""
        self._processes = 1
        self._started = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn the folder, at a point that every rank reaches: Lightning sends it around."""
        folder = trainer.log_dir if trainer.loggers else None
        self._folder = None if folder is None else Path(folder)
        self._model, self._processes = model_name(pl_module), trainer.world_size
        self._started = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Say why a fit did nothing: the checkpoint that it went on from was the end."""
        started, self._started = self._started, False
        if stage == "fit" and not started and 0 < trainer.max_steps <= trainer.global_step:
            rank_zero_info(
                f"Nothing was left to train: the checkpoint is that of step {trainer.global_step:,}, and `max_steps` is"
                f" {trainer.max_steps:,}. Raise `trainer.max_steps`, or set `ckpt_path: null` to start anew."
            )

    def closing_lines(self) -> list[str]:
        """The parity that was measured for this model, or how to measure it; and the files of the run."""
        names = sorted(path.name for path in self._folder.iterdir()) if self._folder and self._folder.is_dir() else []
        lines = [line] if (line := parity_line(FOLDER / REPORT, self._model)) is not None else []
        if not lines and self._processes > 1 and "config.yaml" in names:
            command = f"longctx doctor --config {self._folder}/config.yaml"
            lines.append(f"Doctor: not run yet; `{command}` compares every layout with a plain reference.")
        if self._folder and names:
            page = f"; `longctx report {self._folder}` makes a page of them" if is_run(self._folder) else ""
            lines.append(f"Files: {', '.join(names)} in {self._folder}{page}")
        return lines
