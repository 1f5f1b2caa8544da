"""The state of a Lightning run, as a save needs it: tensors of the two slots, and a copy of everything else.

Lightning's own ``dump_checkpoint`` is not used: under a sharding strategy it first copies weights and optimizer to the
host, which is the pause that this package avoids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning import __version__ as lightning_version
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_longctx.callbacks.checkpoint_loggers import logger_identities
from lightning_longctx.checkpoint.plain import snapshot
from lightning_longctx.checkpoint.rng import rng_state
from lightning_longctx.checkpoint.states import optimizer_state, split_tensors, trainable_names

__all__ = ["RunState", "capture", "weights_of"]


class RunState(NamedTuple):
    """A run at a step boundary.

    Attributes:
        weights: tensors of the model, live; empty if nothing in it is trained.
        optimizer: tensors of the optimizers, live; None if there is no optimizer.
        extra: everything else, copied.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] | None
    extra: dict[str, Any]


def capture(trainer: pl.Trainer, module: pl.LightningModule, trainable_only: bool) -> RunState:
    """Take the state of a run. No collective of ours; the same on every rank but for what ranks do not share.

    Args:
        trainer: between two steps.
        module: the module itself, not the wrapper of a strategy.
        trainable_only: leave weights of frozen parameters out.

    Raises:
        CheckpointError: state that could not be loaded without running code; names its key.
    """
    lightning = _lightning_state(trainer, module)
    weights, other = split_tensors(lightning.pop("state_dict"))
    weights = _trained(module, weights) if trainable_only else weights
    tensors, optimizers = optimizer_state(module, trainer.optimizers)
    extra = {
        "lightning": lightning,
        "weights_extra": other,
        "optimizers": optimizers,
        "data": _data_state(trainer),
        "loggers": logger_identities(trainer),
        "model_config": _model_config(module),
        "tokenizer": getattr(module, "tokenizer_home", None),
    }
    copied = {key: snapshot(value, key) for key, value in extra.items() if value is not None}
    return RunState(weights, tensors if trainer.optimizers else None, {**copied, "rng": rng_state()})


def weights_of(module: pl.LightningModule, trainable_only: bool) -> dict[str, Tensor]:
    """The tensors of the weights slot, before hooks of a save change them."""
    weights, _ = split_tensors(module.state_dict())
    return _trained(module, weights) if trainable_only else weights


def _trained(module: pl.LightningModule, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of trainable parameters, and buffers; nothing where nothing is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return {}
    trained = trainable_names(module)
    return {key: value for key, value in weights.items() if key in trained}


def _lightning_state(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    """What Lightning keeps in its own checkpoints, less optimizers and data."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning_version,
        "state_dict": module.state_dict(),
        "loops": {
            "fit_loop": trainer.fit_loop.state_dict(),
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        },
        "callbacks": {one.state_key: kept for one in callbacks if (kept := one.state_dict())},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "optimizer_states": [],
    }
    precision = trainer.precision_plugin
    if kept := precision.state_dict():
        state[type(precision).__qualname__] = kept
    precision.on_save_checkpoint(state)
    if module.hparams:
        state[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
        state[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams)
    for callback in callbacks:
        callback.on_save_checkpoint(trainer, module, state)
    module.on_save_checkpoint(state)
    return state


def _data_state(trainer: pl.Trainer) -> dict[str, Any] | None:
    # Lightning puts this attribute on at run time, and mypy does not know it.
    data = getattr(trainer, "datamodule", None)
    if data is None:
        return None
    key = type(data).__qualname__
    local = getattr(data, "local_state_dict", None)
    if local is not None:
        return {"key": key, "local": True, "state": local()}
    state = data.state_dict() if is_overridden("state_dict", data, pl.LightningDataModule) else {}
    return {"key": key, "local": False, "state": state} if state else None


def _model_config(module: pl.LightningModule) -> str | None:
    """The configuration of a Hugging Face model, for the export."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    return str(to_json()) if to_json is not None else None
