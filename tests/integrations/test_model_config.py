"""Configurations: where they come from, overrides, and what is refused before any weight exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.model_config import (
    apply_overrides,
    check_max_seq_len,
    check_supported,
    load_config,
)
from lightning_longctx.integrations.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_are_supported(name: str) -> None:
    config = load_config(name, None)
    check_supported(config)
    check_max_seq_len(config, 2**20)
    assert config.vocab_size >= 257
    assert config.num_attention_heads % 4 == 0
    assert config.num_key_value_heads == 2
    assert config.head_dim == 32


@pytest.mark.parametrize("as_file", [False, True])
def test_directory_and_file(tmp_path: Path, as_file: bool) -> None:
    load_config("tiny-qwen3", None).save_pretrained(tmp_path)
    home = tmp_path / "config.json" if as_file else tmp_path
    assert load_config(str(home), None).to_dict() == load_config("tiny-qwen3", None).to_dict() | {
        "_name_or_path": load_config(str(home), None).to_dict()["_name_or_path"]
    }


@pytest.mark.parametrize(
    ("config", "pretrained", "message"),
    [
        (None, None, "neither"),
        ("tiny-llama", "somewhere", "both"),
        ("tiny-lama", None, "Did you mean `tiny-llama`"),
        ({"hidden_size": 8}, None, "model_type"),
        ({"model_type": "llama", "hiden_size": 8}, None, "Did you mean `hidden_size`"),
        ({"model_type": "lama"}, None, "transformers accepts"),
        ({"model_type": "llama", "num_hidden_layers": 2.5}, None, "expected int, got float"),
        (None, "Llama-3.1-8B", "local directory"),
    ],
)
def test_unusable_sources_are_refused(config: Any, pretrained: str | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_config(config, pretrained)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_config(str(tmp_path), None)


def test_broken_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama",\n')
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_config(str(tmp_path), None)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    load_config("tiny-llama", None).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="safetensors"):
        load_config(None, str(tmp_path))


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    files = {"auto_map": {"AutoConfig": "code.Thing"}, "model_type": "thing"}
    (tmp_path / "config.json").write_text(json.dumps(files))
    (tmp_path / "code.py").write_text("open('it_ran', 'w')\nclass Thing: ...\n")
    with pytest.raises(ConfigurationError, match="transformers accepts"):
        load_config(str(tmp_path), None)
    assert not Path("it_ran").exists()


def test_rope_theta_reaches_the_rotary_settings() -> None:
    config = load_config("tiny-llama", None, {"rope_theta": 5.0e7, "max_position_embeddings": "512K"})
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5.0e7}
    assert config.max_position_embeddings == 524288


@pytest.mark.parametrize("theta", [None, 2.0e6])
def test_rope_scaling_replaces_the_scaling_and_keeps_the_base(theta: float | None) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    overrides = {"rope_scaling": scaling} | ({} if theta is None else {"rope_theta": theta})
    config = load_config("tiny-qwen3", None, overrides)
    assert config.rope_parameters == {**scaling, "rope_theta": theta or 1.0e6}


def test_overrides_leave_the_original_and_reach_aliases() -> None:
    config = load_config("tiny-qwen3-moe", None)
    changed = apply_overrides(config, {"num_experts": 4, "num_hidden_layers": 2})
    assert (config.num_experts, config.num_hidden_layers) == (8, 3)
    assert (changed.num_experts, changed.num_hidden_layers) == (4, 2)
    assert type(changed) is type(config)


def test_layer_count_changes_where_layers_are_listed() -> None:
    changed = load_config("tiny-qwen3", None, {"num_hidden_layers": 6})
    assert changed.layer_types == ["full_attention"] * 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_tetha": 1e6}, "Did you mean `rope_theta`"),
        ({"model_type": "qwen3"}, "must be a key"),
        ({"num_hidden_layers": "two"}, "expected int, got str"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "Missing required keys"),
        ({"max_position_embeddings": "12X"}, "number of tokens"),
    ],
)
def test_wrong_overrides_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_config("tiny-llama", None, overrides)


@pytest.mark.parametrize(
    ("preset", "overrides", "named"),
    [
        ("tiny-qwen3", {"layer_types": ["chunked_attention", *["full_attention"] * 2]}, "layer_types"),
        ("tiny-llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ("tiny-llama", {"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_models_that_would_train_wrongly_are_refused(preset: str, overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_supported(load_config(preset, None, overrides))


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("gemma2", "attn_logit_softcapping"),
        ("gpt_oss", "attention sinks"),
        ("qwen3_next", "linear_attention"),
        ("llama4_text", "chunked_attention"),
    ],
)
def test_published_models_with_other_layers_are_refused(model_type: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_supported(AutoConfig.for_model(model_type))


def test_positions_message_is_yaml_that_works() -> None:
    config = load_config("tiny-llama", None, {"max_position_embeddings": 8192, "rope_theta": 1.0e4})
    check_max_seq_len(config, 8192)
    with pytest.raises(ConfigurationError, match="max_position_embeddings") as caught:
        check_max_seq_len(config, 65536)
    written = caught.value.fix.split("`")[1]
    overrides = yaml.safe_load(written)["model"]["config_overrides"]
    changed = apply_overrides(config, overrides)
    check_max_seq_len(changed, 65536)
    # eight times the positions: the slowest of 16 rotations must turn 8 times slower than at 1e4, ** (30 / 32)
    slowest = changed.rope_parameters["rope_theta"] ** -(30 / 32)
    assert slowest == pytest.approx(1.0e4 ** -(30 / 32) / 8, rel=0.02)
