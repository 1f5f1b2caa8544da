"""The settings of ``AsyncDCPCheckpoint`` that few runs change."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

__all__ = ["CheckpointOptions"]


@dataclass(frozen=True)
class CheckpointOptions:
    """What few runs change.

    Args:
        keep_every_n_steps: besides the newest ones, keep those of steps that are multiples of this, for ever. Default
            0: none.
        save_top_k: besides, keep so many of the best by ``monitor``. Default 1.
        trainable_only: save weights of trainable parameters (and buffers) only, for a frozen base. Default False.
        on_missing: state that is missing or does not fit at a resume: ``error`` (default), or ``warn`` and start it
            anew.
        trust_pickle: load checkpoints that could run code. Default False.
        timeout: how long one rank may keep the others waiting, and a write the next one of its slot. Default 10
            minutes, where PyTorch's own limit would be 30.
        drain_timeout: how long the end of a run, or an error in it, waits for writes under way. Default 2 minutes.
        stage_dir: node-local folder where files are written before they are copied, for slow shared stores. Default
            None.
        export_hf_at_end: folder for the trained model in Hugging Face's format, written at the end. Default None.
        wandb_reference: let W&B note each checkpoint as an artifact that refers to its path. Default False.
    """

    keep_every_n_steps: int = 0
    save_top_k: int = 1
    trainable_only: bool = False
    on_missing: Literal["error", "warn"] = "error"
    trust_pickle: bool = False
    timeout: timedelta = timedelta(minutes=10)
    drain_timeout: timedelta = timedelta(minutes=2)
    stage_dir: str | None = None
    export_hf_at_end: str | None = None
    wandb_reference: bool = False
