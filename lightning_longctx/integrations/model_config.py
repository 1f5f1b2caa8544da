"""A model's configuration: where it comes from, what a user changed in it, and whether this suite can train it.

Everything here is checked before any weight exists, so that a wrong key costs a second and not a model load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import require_transformers
from lightning_longctx.integrations.presets import PRESETS
from lightning_longctx.spelling import nearest
from lightning_longctx.strategies.refusals import LAYER_TYPES
from lightning_longctx.units import parse_token_count

require_transformers()

from huggingface_hub.errors import StrictDataclassError  # noqa: E402  (after the message on how to install it)
from transformers import AutoConfig, PretrainedConfig  # noqa: E402

__all__ = ["apply_overrides", "check_max_seq_len", "check_supported", "load_config"]

# What transformers raises for a configuration that it cannot build.
_CONFIG_ERRORS = (ValueError, TypeError, KeyError, OSError, StrictDataclassError)

# Keys of a configuration that say which class it is, not how it is built.
_FIXED_KEYS = {"architectures", "auto_map", "model_type", "transformers_version", "dtype", "quantization_config"}

# Keys that models read from a configuration although some configuration classes do not declare them (Qwen3-MoE).
_UNDECLARED_KEYS = {"head_dim"}

# Rotary factors that are the same for every row, or can be made so (`longrope`: see rotary.py). `dynamic` changes them
# with the largest position seen, which differs between shards of a row and between a long row and its short documents.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional", "longrope"}

# Attention with sinks, which no configuration key tells.
_MODELS_WITH_SINKS = {"gpt_oss"}

_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def load_config(
    config: str | Mapping[str, Any] | None, pretrained: str | None, overrides: Mapping[str, Any] | None = None
) -> PretrainedConfig:
    """Load a configuration and change it. Reads local files only and runs no code from them.

    Args:
        config: a preset's name, a directory with ``config.json``, such a file, or a dict with ``model_type``.
        pretrained: a local directory with ``config.json`` and weights. Exactly one of the two is given.
        overrides: values to change; see :func:`apply_overrides`.

    Returns:
        The configuration.

    Raises:
        ConfigurationError: neither or both given, an unknown preset, key or model type, a missing or broken file.
    """
    if (config is None) == (pretrained is None):
        got = "neither" if config is None else "both"
        fix = "Write `config:` to start from random weights, `pretrained:` to start from a checkpoint."
        raise ConfigurationError("model.config", "or `model.pretrained` must be given, and only one", got, fix)
    if pretrained is not None:
        _check_weights(Path(pretrained))
        found = _from_path(Path(pretrained), "model.pretrained")
    elif isinstance(config, Mapping):
        found = _from_dict(config, "model.config")
    else:
        found = _from_name(str(config))
    return apply_overrides(found, overrides or {})


def apply_overrides(
    config: PretrainedConfig, overrides: Mapping[str, Any], field: str = "model.config_overrides"
) -> PretrainedConfig:
    """Return a configuration with some values changed.

    ``rope_theta`` and ``rope_scaling`` are understood in any model with rotary positions, wherever transformers keeps
    them; ``max_position_embeddings`` may be written ``512K``.

    Args:
        config: the configuration to start from; it is left as it is.
        overrides: values by key.
        field: the name to use in errors.

    Returns:
        A new configuration of the same class, validated by it.

    Raises:
        ConfigurationError: a key that this model type does not have, or a value it refuses.
    """
    if not overrides:
        return config
    data, changes = config.to_dict(), dict(overrides)
    names = {key for key in data if not key.startswith("_")} | set(config.attribute_map) - _FIXED_KEYS
    rotary = data.get("rope_parameters")
    names |= _UNDECLARED_KEYS | ({"rope_theta", "rope_scaling"} if rotary else set())
    for key in changes:
        if key not in names or key in _FIXED_KEYS:
            raise _unknown_key(f"{field}.{key}", key, names - _FIXED_KEYS, config.model_type)
    if rotary:
        _override_rotary(data, changes, field)
    if isinstance(changes.get("max_position_embeddings"), str):
        value = changes["max_position_embeddings"]
        changes["max_position_embeddings"] = parse_token_count(value, f"{field}.max_position_embeddings")
    if "num_hidden_layers" in changes and "layer_types" not in changes:
        data.pop("layer_types", None)  # one entry a layer: the class fills it in again
    data.update({config.attribute_map.get(key, key): value for key, value in changes.items()})
    try:
        return type(config).from_dict(data)
    except _CONFIG_ERRORS as error:
        raise _refused(field, dict(overrides), error) from error


def check_supported(config: PretrainedConfig) -> None:
    """Refuse configurations that would silently train something else than they say.

    Args:
        config: the final configuration.

    Raises:
        ConfigurationError: layers other than full and sliding attention, sinks, capped scores, rotary factors that
            depend on the row, attention dropout, or quantized weights.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        fix = (
            "Write `config_overrides: {layer_types: [full_attention, ...]}`, one for each layer, or take another model."
        )
        rule = f"must all be of {sorted(LAYER_TYPES)}"
        raise ConfigurationError("model.config.layer_types", rule, sorted(kinds), fix)
    if config.model_type in _MODELS_WITH_SINKS:
        fix = "Attention sinks are not implemented: take another model."
        raise ConfigurationError("model.config.model_type", "must be without attention sinks", config.model_type, fix)
    if getattr(config, "attn_logit_softcapping", None):
        fix = "Write `config_overrides: {attn_logit_softcapping: null}`, or take another model."
        got = config.attn_logit_softcapping
        raise ConfigurationError("model.config.attn_logit_softcapping", "must be null: cores do not cap", got, fix)
    for rotary in _rotary_dicts(getattr(config, "rope_parameters", None)):
        kind = rotary.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            fix = "Write `config_overrides: {rope_scaling: {rope_type: yarn, factor: 4.0, ...}}` or raise `rope_theta`."
            rule = f"must be one of {sorted(_ROPE_TYPES)}, whose factors do not depend on the row"
            raise ConfigurationError("model.config.rope_parameters.rope_type", rule, kind, fix)
    for key in _DROPOUT_KEYS:
        if getattr(config, key, 0):
            fix = f"Write `config_overrides: {{{key}: 0.0}}`."
            raise ConfigurationError(f"model.config.{key}", "must be 0", getattr(config, key), fix)
    if getattr(config, "quantization_config", None):
        fix = "Save the weights in bfloat16 or float32 first."
        raise ConfigurationError("model.config.quantization_config", "must be absent", "quantized weights", fix)


def check_max_seq_len(config: PretrainedConfig, max_seq_len: int) -> None:
    """Check that a model has positions for the longest row's documents.

    Args:
        config: the final configuration.
        max_seq_len: the longest document, in tokens.

    Raises:
        ConfigurationError: the model was made for fewer positions. The message has the YAML to write, with the
            ``rope_theta`` that stretches the slowest rotation over the new length and leaves the fastest as it is
            (NTK-aware scaling).
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or max_seq_len <= limit:
        return
    lines = [f"max_position_embeddings: {max_seq_len}"]
    rotary = _rotary_dicts(getattr(config, "rope_parameters", None))
    if rotary and rotary[0].get("rope_theta"):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = rotary[0]["rope_theta"] * (max_seq_len / limit) ** (width / max(width - 2, 1))
        lines.insert(
            0, f"rope_theta: {theta:.3g}" if "e" not in f"{theta:.3g}" else f"rope_theta: {_yaml_float(theta)}"
        )
    fix = f"Write `model: {{config_overrides: {{{', '.join(lines)}}}}}`, or lower `data.max_seq_len`."
    got = f"data.max_seq_len = {max_seq_len:,}"
    raise ConfigurationError(
        "model.config.max_position_embeddings", f"is {limit:,} and must cover every position", got, fix
    )


def _from_name(name: str) -> PretrainedConfig:
    if name in PRESETS:
        return _from_dict(PRESETS[name], "model.config")
    path = Path(name)
    if path.is_dir() or path.is_file():
        return _from_path(path, "model.config")
    near = nearest(name, PRESETS)
    hint = f"Did you mean `{near}`? " if near else ""
    fix = f"{hint}Presets: {', '.join(sorted(PRESETS))}."
    raise ConfigurationError(
        "model.config", "must be a preset, a local directory or file, or a mapping", repr(name), fix
    )


def _from_dict(data: Mapping[str, Any], field: str) -> PretrainedConfig:
    values = dict(data)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ConfigurationError(field, "must name its `model_type`", sorted(values), "Write `model_type: llama`, say.")
    try:
        base = AutoConfig.for_model(model_type)
        names = {*base.to_dict(), *base.attribute_map, *_UNDECLARED_KEYS, "rope_theta", "rope_scaling"}
        for key in values:
            if key not in names:
                raise _unknown_key(f"{field}.{key}", key, names, model_type)
        return AutoConfig.for_model(model_type, **values)
    except ConfigurationError:
        raise
    except _CONFIG_ERRORS as error:
        raise _refused(field, model_type, error) from error


def _from_path(path: Path, field: str) -> PretrainedConfig:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigurationError(
            field, "must have a config.json", str(path), "Give a local directory of a Hugging Face model."
        )
    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            field, "must be JSON", f"{file}, line {error.lineno}", "Mend or replace the file."
        ) from error
    except _CONFIG_ERRORS as error:
        raise _refused(field, str(file), error) from error


def _check_weights(path: Path) -> None:
    if not path.is_dir():
        fix = "Download the model first and give its directory. Names of a hub are not resolved."
        raise ConfigurationError("model.pretrained", "must be a local directory", repr(str(path)), fix)
    # On the meta device only shapes are wanted (`longctx plan`), and a laptop need not have the weights.
    shapes_only = torch.get_default_device().type == "meta"
    if not shapes_only and not any(path.glob("*.safetensors")):
        fix = "Convert the weights to safetensors: pickled weights can run code and are not loaded."
        raise ConfigurationError("model.pretrained", "must hold *.safetensors", str(path), fix)


def _override_rotary(data: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    """Move ``rope_theta`` and ``rope_scaling`` to where transformers 5 keeps them: ``rope_parameters``."""
    theta, scaling = changes.pop("rope_theta", None), changes.pop("rope_scaling", None)
    if theta is None and scaling is None:
        return
    rotary = dict(changes.get("rope_parameters") or data["rope_parameters"])
    if any(isinstance(value, Mapping) for value in rotary.values()):
        fix = "Write `rope_parameters:` with one entry for each kind of layer."
        raise ConfigurationError(f"{field}.rope_theta", "must be unambiguous", "rotary settings per layer type", fix)
    if scaling is not None:
        # A new scaling replaces the old one whole; the base stays unless it is given too.
        rotary = {key: rotary[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotary} | dict(scaling)
    if theta is not None:
        rotary["rope_theta"] = float(theta)
    changes["rope_parameters"] = rotary


def _rotary_dicts(rotary: Any) -> list[Mapping[str, Any]]:
    if not isinstance(rotary, Mapping):
        return []
    nested = [value for value in rotary.values() if isinstance(value, Mapping)]
    return nested or [rotary]


def _yaml_float(value: float) -> str:
    """Three digits with a point: YAML 1.1 reads ``5e+07`` as a string and ``5.0e+07`` as a number."""
    return f"{value:.2e}"


def _unknown_key(field: str, key: str, names: set[str], model_type: str) -> ConfigurationError:
    near = nearest(key, sorted(names))
    fix = f"Did you mean `{near}`?" if near else f"Keys: {', '.join(sorted(names))}."
    return ConfigurationError(field, f"must be a key that a {model_type} configuration lets you set", repr(key), fix)


def _refused(field: str, got: object, error: Exception) -> ConfigurationError:
    reason = " ".join(str(error).split())
    return ConfigurationError(field, "must be a configuration that transformers accepts", got, f"It says: {reason}")
