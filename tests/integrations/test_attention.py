"""What the attention ``longctx`` refuses, and that nothing is refused without need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.attention import (
    AttentionProbe,
    longctx_attention,
    longctx_mask,
    register_attention,
)
from lightning_longctx.integrations.causal_lm import CausalLMModule

_TWO = PackedSequence(torch.tensor([0, 4, 6], dtype=torch.int32), 4)


def call(packed: Any = _TWO, mask: Any = None, module: nn.Module | None = None, **kwargs: Any) -> Any:
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    return longctx_attention(module or nn.Identity(), query, key, key, mask, packed_sequence=packed, **kwargs)


def test_layout_is_that_of_transformers() -> None:
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    out, weights = longctx_attention(nn.Identity(), query, key, value, None, scaling=0.3, packed_sequence=_TWO)
    assert weights is None
    assert out.shape == (1, 6, 4, 8)
    assert out.is_contiguous()
    for part in (slice(0, 4), slice(4, 6)):
        q, k, v = query[:, :, part], key[:, :, part], value[:, :, part]
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"packed": None}, "packed_sequence"),
        ({"mask": torch.ones(1, 1, 6, 6)}, "attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"softcap": 50.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"indices": torch.zeros(1)}, "indices"),
    ],
)
def test_what_the_core_does_not_compute_is_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        call(**kwargs)


def test_module_that_is_not_causal_is_refused() -> None:
    module = nn.Identity()
    module.is_causal = False
    with pytest.raises(ConfigurationError, match="causal"):
        call(module=module)


def test_arguments_without_effect_pass() -> None:
    out, _ = call(sliding_window=None, softcap=None, position_ids=torch.zeros(1), use_cache=False, dropout=0.0)
    assert out.shape == (1, 6, 4, 8)


def test_probe_records_and_computes_nothing() -> None:
    probe = AttentionProbe()
    out, _ = call(packed=probe)
    assert probe.calls == ["Identity"]
    assert out.shape == (1, 6, 4, 8)
    assert not out.any()


def test_mask_is_none_and_padding_is_refused() -> None:
    assert longctx_mask(batch_size=1, q_length=6, kv_length=6) is None
    with pytest.raises(ConfigurationError, match="attention_mask"):
        longctx_mask(attention_mask=torch.ones(1, 6, dtype=torch.bool), batch_size=1)


def test_registered_once_and_again() -> None:
    register_attention()
    assert AttentionInterface()["longctx"] is longctx_attention
    assert AttentionMaskInterface()["longctx"] is longctx_mask


def test_model_called_without_bounds_is_refused() -> None:
    module = CausalLMModule(config="tiny-llama")
    module.configure_model()
    with pytest.raises(ConfigurationError, match=r"model\(\*\*model_inputs\(batch\)\)"):
        module.model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_padding_mask_of_a_caller_is_refused() -> None:
    module = CausalLMModule(config="tiny-llama")
    module.configure_model()
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="attention_mask"):
        module.model(input_ids=ids, attention_mask=torch.ones_like(ids), packed_sequence=_TWO, use_cache=False)
