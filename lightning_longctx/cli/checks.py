"""Checks that need no process group: sizes that cannot divide, and a checkpoint that is not there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_longctx.errors import ConfigurationError, FieldError
from lightning_longctx.strategies.checks import check_parts

__all__ = ["check_checkpoint_path", "check_sizes", "hidden_refusal"]

# Words that Lightning takes for ckpt_path instead of a path.
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")


def check_checkpoint_path(path: object) -> None:
    """Check that a checkpoint to start from is there.

    Args:
        path: ``ckpt_path``: a local path, a URL, one of Lightning's words such as ``last``, or None.

    Raises:
        ConfigurationError: a local path that does not exist.
    """
    if not isinstance(path, (str, Path)) or "://" in str(path) or str(path).partition(":")[0] in _CHECKPOINT_WORDS:
        return
    if not Path(path).exists():
        words = ", ".join(_CHECKPOINT_WORDS[:2])
        fix = f"Check the path, or give one of the words {words}."
        raise ConfigurationError("ckpt_path", "must exist", repr(str(path)), fix)


def check_sizes(trainer: Trainer, datamodule: LightningDataModule | None, model: LightningModule) -> None:
    """Check that processes, token budgets and heads can be divided as asked, while one process still speaks for all.

    The strategy is asked for ``sequence_parallel_size`` and ``check_model(model)``, and data module and model for
    ``check``, see :func:`~lightning_longctx.strategies.checks.check_parts`.

    Args:
        trainer: built, not yet running.
        datamodule: the data module, or None.
        model: the model.

    Raises:
        ConfigurationError: a size that does not divide, with the arithmetic.
    """
    processes = trainer.num_devices * trainer.num_nodes
    sp_size = int(getattr(trainer.strategy, "sequence_parallel_size", 1))
    if sp_size < 1 or processes % sp_size:
        got = f"{sp_size} for {trainer.num_devices} devices x {trainer.num_nodes} nodes = {processes} processes"
        fix = f"Use one of {[size for size in range(1, processes + 1) if processes % size == 0]}, or other `devices`."
        rule = "must divide the number of processes"
        raise ConfigurationError("trainer.strategy.sequence_parallel_size", rule, got, fix)
    check_parts(trainer, (datamodule, model))
    check_model = getattr(trainer.strategy, "check_model", None)
    if callable(check_model):
        check_model(model)


def hidden_refusal(config: Any) -> FieldError | None:
    """Find which of our classes refuses its settings, after building the whole configuration failed.

    Where a setting may be a name or a class, jsonargparse tries both and tells of the last attempt only, so the refusal
    of the class is lost. Classes with plain settings are built again, alone, until one refuses.

    Args:
        config: a parsed configuration as plain containers, or a part of it.
    """
    if not isinstance(config, dict):
        return None
    for value in config.values():
        if (found := hidden_refusal(value)) is not None:
            return found
    path, settings = config.get("class_path"), config.get("init_args")
    if not isinstance(path, str) or not path.startswith("lightning_longctx.") or not isinstance(settings, dict):
        return None
    if any(isinstance(value, dict) for value in settings.values()):
        return None
    module, _, name = path.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)(**settings)
    except FieldError as refusal:
        return refusal
    except (TypeError, ValueError, AttributeError):  # not for us to explain: the first error stands
        return None
    return None
