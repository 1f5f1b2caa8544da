"""A small model of the same family, and its plain twin: both compute what the large one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.integrations.model_config import load_config
from lightning_longctx.integrations.shrink import shrunk_config
from tests.integrations.rows import make_documents, pack, relative_error
from tests.integrations.test_parity import FAMILIES
from tests.integrations.test_rotary import PHI3

LARGE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 8},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3-windows": {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 4096,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    },
    "qwen3-moe": {"model_type": "qwen3_moe"},
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": None},
    "cohere": {"model_type": "cohere"},
    "granite": {"model_type": "granite"},
    "phi3": PHI3 | {"max_position_embeddings": 131072},
}


@pytest.mark.parametrize("family", LARGE)
def test_a_small_one_of_the_family_is_built_and_equals_its_twin(family: str) -> None:
    large = CausalLMModule(config=LARGE[family])
    module = large.for_cpu_check(full=False)
    module.configure_model()
    assert sum(parameter.numel() for parameter in module.parameters()) < 400_000
    assert set(getattr(module.config, "layer_types", None) or ()) == set(
        getattr(large.config, "layer_types", None) or ()
    )

    batch = pack(make_documents(20, 1, 12, vocabulary=64), padding=7)
    twin = module.plain_twin()
    loss, per_token = twin.row_loss(batch)
    out = module.training_step(batch, 0)
    assert relative_error(out["per_token_loss"][0], per_token) <= 1e-5
    loss.backward()
    out["loss"].backward()
    theirs = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        got = parameter.grad * batch["loss_divisor"]
        largest = max(float(value.grad.abs().max()) for value in theirs.values() if value.grad is not None)
        assert float((got - theirs[name].grad).abs().max()) <= 1e-5 * max(largest / 100, float(got.abs().max())), name


def test_ratios_and_kinds_stay() -> None:
    small = shrunk_config(load_config({"model_type": "llama", "num_key_value_heads": 8}, None))
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (8, 2)
    kinds = shrunk_config(load_config(LARGE["qwen3-windows"], None))
    assert kinds["layer_types"] == ["sliding_attention", "full_attention"]
    assert kinds["sliding_window"] == 8
    moe = shrunk_config(load_config({"model_type": "qwen3_moe"}, None))
    assert (moe["num_experts"], moe["num_experts_per_tok"]) == (8, 2)


def test_whole_keeps_size_and_settings() -> None:
    module = CausalLMModule(config=FAMILIES["qwen3-moe"], config_overrides={"router_aux_loss_coef": 0.3})
    whole = module.for_cpu_check(full=True)
    assert whole.config.hidden_size == 32
    assert whole.wants_router_loss
    small = module.for_cpu_check(full=False)
    assert small.wants_router_loss
    small.configure_model()
    assert small.router_loss is not None
    assert small.router_loss.coefficient == 0.3


def test_the_twin_has_the_router_loss_of_the_row() -> None:
    module = CausalLMModule(config=FAMILIES["qwen3-moe"], config_overrides={"router_aux_loss_coef": 0.5})
    module.configure_model()
    batch = pack(make_documents(7, 12), padding=5)
    out = module.training_step(batch, 0)
    loss, _ = module.plain_twin().row_loss(batch)
    torch.testing.assert_close(out["loss"] * batch["loss_divisor"], loss)
    assert out["extra_terms"]["router_aux_loss"].item() > 0.01
