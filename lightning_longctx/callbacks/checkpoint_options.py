"""The settings of ``AsyncDCPCheckpoint`` that few runs change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import check_whole

__all__ = ["CheckpointOptions", "check_interval", "check_options", "local_folder"]

_FIELD = "callbacks.AsyncDCPCheckpoint"


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
        drain_timeout: how long a run that ends in an error waits for writes under way. Default 2 minutes.
        stage_dir: node-local folder where files are written before they are copied, for slow shared stores. Default
            None.
        export_hf_at_end: folder of this machine for the trained model in Hugging Face's format, written at the end.
            Default None.
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

    def __post_init__(self) -> None:
        for name in ("keep_every_n_steps", "save_top_k"):
            check_whole(f"{_FIELD}.options.{name}", getattr(self, name), 0)
        if self.on_missing not in ("error", "warn"):
            _refuse("options.on_missing", "must be `error` or `warn`", self.on_missing, "Choose one.")
        for name in ("trainable_only", "trust_pickle", "wandb_reference"):
            if not isinstance(getattr(self, name), bool):
                _refuse(f"options.{name}", "must be true or false", getattr(self, name), "Choose one.")
        if self.trainable_only and self.export_hf_at_end is not None:
            fix = "Leave one out: a part of the weights is no model."
            _refuse("options.export_hf_at_end", "cannot be used together with trainable_only", "both", fix)
        check_interval("options.timeout", self.timeout, zero=False)
        check_interval("options.drain_timeout", self.drain_timeout)
        for name in ("stage_dir", "export_hf_at_end"):
            folder = local_folder(f"options.{name}", getattr(self, name))
            object.__setattr__(self, name, None if folder is None else str(folder))


def check_options(options: object) -> CheckpointOptions:
    """Make sure that the group of settings is one.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(options, CheckpointOptions):
        fix = "Give `CheckpointOptions(...)`, or leave it out."
        _refuse("options", "must be CheckpointOptions", options, fix)
    assert isinstance(options, CheckpointOptions)
    return options


def check_interval(name: str, value: object, zero: bool = True) -> None:
    """Make sure that a setting is a length of time.

    Raises:
        ConfigurationError: another type, or negative, or nothing where that could not work.
    """
    fix = "Give `timedelta(minutes=10)`, or `0:10:00` in YAML."
    if not isinstance(value, timedelta) or value < timedelta(0):
        _refuse(name, "must be a length of time", value, fix)
    if not value and not zero:
        _refuse(name, "must be longer than nothing", value, fix)


def local_folder(name: str, path: object) -> Path | None:
    """A folder of this machine, with the home folder for ``~``.

    Raises:
        ConfigurationError: an address, nothing at all, or no path.
    """
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        _refuse(name, "must be a folder", path, "Give its path, or leave it out.")
    if "://" in str(path):
        _refuse(name, "must be a folder of this machine", path, "Give a path; only `dirpath` may be an address.")
    return Path(str(path)).expanduser()


def _refuse(name: str, rule: str, got: object, fix: str) -> NoReturn:
    raise ConfigurationError(f"{_FIELD}.{name}", rule, repr(str(got) if isinstance(got, os.PathLike) else got), fix)
