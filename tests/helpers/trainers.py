"""A Trainer that prints nothing and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def quiet_trainer(**settings: Any) -> pl.Trainer:
    """A Trainer on one CPU device, without logger, checkpoints, progress bar and summary but for what is asked."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(quiet | settings))
