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
from torch.optim import Optimizer

from lightning_longctx.callbacks.checkpoint_loggers import logger_identities
from lightning_longctx.callbacks.checkpoint_report import logged_steps
from lightning_longctx.checkpoint.plain import snapshot
from lightning_longctx.checkpoint.rng import rng_state
from lightning_longctx.checkpoint.states import optimizer_state, plain_name, split_tensors, trainable_names

__all__ = ["RunState", "capture", "optimizers_of", "weights_of"]


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


def capture(
    trainer: pl.Trainer, module: pl.LightningModule, trainable_only: bool, trust_pickle: bool = False
) -> RunState:
    """Take the state of a run. No collective of ours; the same on every rank but for what ranks do not share.

    Args:
        trainer: between two steps.
        module: the module itself, not the wrapper of a strategy.
        trainable_only: leave weights of frozen parameters out.
        trust_pickle: take state that only a pickle can hold.

    Raises:
        CheckpointError: state that could not be loaded without running code; names its key.
    """
    lightning = _lightning_state(trainer, module)
    state = lightning.pop("state_dict")
    weights, other = _weights(module, state, trainable_only)
    present = optimizers_of(trainer)
    tensors, optimizers = optimizer_state(module, present)
    extra = {
        "lightning": lightning,
        "weights_extra": other,
        "optimizers": optimizers,
        "data": _data_state(trainer),
        "loggers": logger_identities(trainer),
        "logged_steps": logged_steps(trainer),
        "schedulers": [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs],
        **_hugging_face(module),
        "tokenizer": getattr(module, "tokenizer_home", None),
    }
    copied = {key: snapshot(value, key, trust_pickle) for key, value in extra.items() if value is not None}
    return RunState(weights, tensors if present else None, {**copied, "rng": rng_state()})


def optimizers_of(trainer: pl.Trainer) -> list[Optimizer]:
    """The optimizers of a run, without the one that Lightning puts in place of none."""
    return [one for one in trainer.optimizers if one.param_groups]


def weights_of(module: pl.LightningModule, trainable_only: bool) -> dict[str, Tensor]:
    """The tensors of the weights slot, before hooks of a save change them."""
    return _weights(module, module.state_dict(), trainable_only)[0]


def _weights(
    module: pl.LightningModule, state: Mapping[str, Any], trainable_only: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the module by plain name, and the rest; only those that training changes, if that is asked."""
    tensors, other = split_tensors(state)
    weights = {plain_name(key): value for key, value in tensors.items()}
    if not trainable_only:
        return weights, other
    trains = any(parameter.requires_grad for parameter in module.parameters())
    trained = trainable_names(module) if trains else set()
    return {name: value for name, value in weights.items() if name in trained}, other


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


def _hugging_face(module: pl.LightningModule) -> dict[str, str]:
    """For the export: where the module holds its Hugging Face model, and the configuration of that; empty without."""
    found = {name: part for name, part in module.named_children() if _config_of(part) is not None}
    if len(found) != 1:  # none, or nobody knows which is meant
        return {}
    ((name, part),) = found.items()
    config = _config_of(module) or _config_of(part)  # its own, where it has one, is the one that it was built from
    return {"model_prefix": f"{name}.", "model_config": str(config.to_json_string())}


def _config_of(part: Any) -> Any:
    config = getattr(part, "config", None)
    return config if hasattr(config, "to_json_string") else None
