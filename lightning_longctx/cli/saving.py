"""Where a run writes beside its checkpoints: that it takes no file of the user's for its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_longctx.tools.versions import installed_versions

__all__ = ["KeepingSaveConfig"]


class KeepingSaveConfig(SaveConfigCallback):
    """Saves the configuration over that of an earlier run, and never over a file that somebody wrote.

    Without a logger the folder is the working folder, where ``config.yaml`` is what many call their own.

    Args:
        given: the configuration files of the command line.
        settings: those of Lightning's class.
    """

    def __init__(self, *args: Any, given: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._given = [Path(name) for name in given]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save once, unless a file of the user's is in the way: that is told."""
        folder = trainer.log_dir  # every rank asks: Lightning sends it around
        if not self.already_saved and folder is not None:
            path = Path(folder, self.config_filename)
            own_folder = hasattr(trainer.logger, "log_dir")  # other loggers share one: W&B's is the working folder
            if trainer.strategy.broadcast(trainer.is_global_zero and self._is_theirs(path, own_folder)):
                fix = "Set `trainer.logger`, whose folder takes it, or rename the file."
                rank_zero_warn(f"The configuration of this run was not saved: `{path}` is a file of yours. {fix}")
                self.already_saved = True
        super().setup(trainer, pl_module, stage)

    def _is_theirs(self, path: Path, own_folder: bool) -> bool:
        if not path.is_file():
            return False
        read = any(name.is_file() and name.samefile(path) for name in self._given)
        first_line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        return (read and not own_folder) or not first_line.startswith(f"# {next(iter(installed_versions()))}==")
