"""Where pictures and tables of expert load go: files in the log directory, and loggers that take pictures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_longctx.callbacks.router_history import RouterHistory
from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.callbacks.router_picture import draw_heatmap, draw_history

__all__ = ["publish_history", "publish_window", "run_folder"]

_FOLDER = "moe_router"
_TABLE = "tokens_per_expert.csv"


def run_folder(directory: Path, resumed: bool) -> Path:
    """Make the folder of a run: ``moe_router``, or ``moe_router_1`` and so on where other runs have theirs already.

    Some loggers give all runs one directory, and the table of one run must not go on in that of another.

    Args:
        directory: log directory of the run.
        resumed: whether the run goes on, so that the newest folder is its own.
    """
    folders = [directory / _FOLDER]
    while folders[-1].exists():
        folders.append(directory / f"{_FOLDER}_{len(folders)}")
    folder = folders[-2] if resumed and len(folders) > 1 else folders[-1]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish_window(load: RouterLoad, folder: Path, loggers: Sequence[Any], step: int) -> None:
    """Write the picture and the table of a window, and give the picture to the loggers.

    Args:
        load: the window.
        folder: of the run: :func:`run_folder`.
        loggers: of the trainer.
        step: on the loggers' axis.
    """
    picture = draw_heatmap(load)
    picture.save(folder / f"steps_{load.first_step:08d}-{load.last_step:08d}.png")
    _append_table(load, folder / _TABLE)
    for logger in loggers:
        _give(logger, "moe/expert_load", picture, load.caption, step)


def publish_history(history: RouterHistory, folder: Path, loggers: Sequence[Any], step: int) -> None:
    """Write ``heatmap_over_time.png``: every window of the run, also of before a resume."""
    picture = draw_history(history)
    picture.save(folder / "heatmap_over_time.png")
    caption = f"steps {history.first_step}-{history.steps[-1]}"
    for logger in loggers:
        _give(logger, "moe/expert_load_over_time", picture, caption, step)


def _append_table(load: RouterLoad, path: Path) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["first_step", "last_step", "layer", "module", "expert", "tokens"])
        for label, module, counts in zip(load.labels, load.paths, load.tokens, strict=True):
            for expert, tokens in enumerate(counts.tolist()):
                writer.writerow([load.first_step, load.last_step, label, module, expert, tokens])


def _give(logger: Any, key: str, picture: Image.Image, caption: str, step: int) -> None:
    """Give a picture to a logger that takes pictures; others have the files."""
    if callable(getattr(logger, "log_image", None)):  # Weights & Biases
        logger.log_image(key=key, images=[picture], step=step, caption=[caption])
        return
    experiment: Any = getattr(logger, "experiment", None)
    if callable(getattr(experiment, "add_image", None)):  # TensorBoard
        experiment.add_image(key, np.asarray(picture), global_step=step, dataformats="HWC")
    elif callable(getattr(experiment, "log_image", None)) and hasattr(logger, "run_id"):  # MLflow
        experiment.log_image(logger.run_id, np.asarray(picture), f"{key}/step_{step:08d}.png")
