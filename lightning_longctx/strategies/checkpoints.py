"""What the strategy can load: directories of this package, and both forms of stock Lightning, without running code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.discovery import as_checkpoint, check_one_checkpoint, is_checkpoint, reading
from lightning_longctx.checkpoint.layout import COMMIT, METADATA
from lightning_longctx.checkpoint.plain import load_plain
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.restore import OpenCheckpoint, agree_or_raise
from lightning_longctx.checkpoint.states import load_named_optimizer_state, split_tensors
from lightning_longctx.errors import CheckpointError

__all__ = ["load_any_checkpoint"]

#: Stock Lightning's file beside the tensors of a sharded directory.
_STOCK_STATE = "meta.pt"


def load_any_checkpoint(
    strategy: ModelParallelStrategy, given: Any, load_file: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """Load weights and optimizers in place, and return the rest of the checkpoint.

    Args:
        strategy: with its module sharded and its optimizers made.
        given: path or address of a checkpoint, the same on every rank.
        load_file: loads what is no directory.

    Raises:
        CheckpointError: it is damaged or does not fit; on every rank.
    """
    path = as_checkpoint(given)
    if is_checkpoint(path):
        load = _load_own
    elif (path / METADATA).is_file() and (path / _STOCK_STATE).is_file():
        load = _load_stock_directory
    else:
        check_one_checkpoint(path)
        return load_file(path if isinstance(path, Path) else str(path))
    error, state = None, dict[str, Any]()
    try:
        with reading(path):
            state = load(strategy, path)
    except CheckpointError as problem:
        error = problem
    agree_or_raise(error, _host_group(strategy), path / (COMMIT if is_checkpoint(path) else METADATA))
    return state


def _load_own(strategy: ModelParallelStrategy, path: Folder) -> dict[str, Any]:
    module = strategy.lightning_module
    assert module is not None
    trainer: Any = module.trainer
    # The callback's settings, asked for by capability: a strategy does not know callbacks.
    options = next((one.options for one in trainer.callbacks if hasattr(one, "find_latest")), None)
    opened = OpenCheckpoint(path, getattr(options, "on_missing", "error"), getattr(options, "trust_pickle", False))
    if trainer.state.fn == TrainerFn.FITTING:
        opened.require_resumable()
    opened.load_weights(module, strict=module.strict_loading)
    if trainer.state.fn == TrainerFn.FITTING:
        opened.load_optimizers(module, [one for one in strategy.optimizers if one.param_groups])
    state = opened.run_state(strategy.topology)  # type: ignore[attr-defined]  # LongContextFSDPStrategy has it
    if trainer.state.fn == TrainerFn.FITTING:
        opened.fit_schedulers(state, [one.scheduler for one in trainer.lr_scheduler_configs])
    return state


def _load_stock_directory(strategy: ModelParallelStrategy, path: Folder) -> dict[str, Any]:
    """Lightning's own way goes through the pickle of the metadata, and so through whatever code it holds."""
    module = strategy.lightning_module
    assert module is not None
    directory = TensorDirectory(path, foreign=True)
    targets, _ = split_tensors(module.state_dict())
    saved = {key: f"state_dict.{key}" for key in targets}
    missing = [key for key, stored in saved.items() if stored not in directory]
    if missing and module.strict_loading:
        fix = "Build the model as it was saved, or set `strict_loading` of the module to False."
        raise CheckpointError(str(path), "must hold every weight", f"none for {missing[:8]}", fix)
    directory.read_into({saved[key]: _as_tensor(value) for key, value in targets.items() if key not in missing})
    state: dict[str, Any] = load_plain(path / _STOCK_STATE)
    for number, optimizer in enumerate(strategy.optimizers):
        load_named_optimizer_state(directory, number, optimizer, module)
    return state


def _as_tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _host_group(strategy: ModelParallelStrategy) -> dist.ProcessGroup | None:
    return strategy.topology.host_group  # type: ignore[attr-defined, no-any-return]  # LongContextFSDPStrategy has it
