"""What the attention ``longctx`` refuses, and that nothing is refused without need."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.integrations.attention import (
    AttentionProbe,
    attention_name,
    is_longctx,
    longctx_attention,
    longctx_mask,
    register_attention,
)
from lightning_longctx.integrations.causal_lm import CausalLMModule
from lightning_longctx.strategies.attention import CORES
from tests.integrations.rows import make_documents, pack

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
    call(packed=probe, sliding_window=3)
    assert probe.windows == [None, 3]
    assert out.shape == (1, 6, 4, 8)
    assert not out.any()


def test_mask_is_none_and_padding_is_refused() -> None:
    assert longctx_mask(batch_size=1, q_length=6, kv_length=6) is None
    with pytest.raises(ConfigurationError, match="attention_mask"):
        longctx_mask(attention_mask=torch.ones(1, 6, dtype=torch.bool), batch_size=1)


def test_registered_once_and_again() -> None:
    register_attention()
    assert AttentionInterface()["longctx"] is longctx_attention
    assert AttentionInterface()["longctx_fa"].keywords == {"core": "flash_attn"}
    assert {attention_name(core) for core in CORES} <= set(AttentionMaskInterface().valid_keys())
    assert is_longctx("longctx_documents")
    assert not is_longctx("sdpa")
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


@pytest.mark.parametrize("positions", [None, torch.arange(6)[None]], ids=["none", "not restarted"])
def test_packed_rows_without_positions_are_refused(positions: Any) -> None:
    """Without positions a model counts from 0 through the whole shard: right for one document alone."""
    ids = torch.zeros(1, 6, dtype=torch.long)
    model = tiny()
    with pytest.raises(ConfigurationError, match=r"restart at 0 in each document.*4 at token 4 of the row"):
        model(input_ids=ids, position_ids=positions, packed_sequence=_TWO, use_cache=False)
    right = torch.tensor([[0, 1, 2, 3, 0, 1]])
    model(input_ids=ids, position_ids=right, packed_sequence=_TWO, use_cache=False)


@pytest.mark.parametrize(
    ("kind", "size", "window", "message"),
    [
        ("full_attention", 4, None, None),
        ("sliding_attention", 4, 4, None),
        ("sliding_attention", None, None, None),
        ("sliding_attention", 4, None, "must get its sliding window with the call.*a window of 4"),
        ("chunked_attention", None, None, "must be full or sliding attention.*chunked_attention"),
    ],
)
def test_a_layer_that_restricts_attention_by_its_mask_alone_is_refused(
    kind: str, size: int | None, window: int | None, message: str | None
) -> None:
    """Also without CausalLMModule, and on one rank: the mask that would do it is not made."""
    module = nn.Identity()
    module.config, module.layer_idx = SimpleNamespace(layer_types=["other", kind], sliding_window=size), 1
    if message is None:
        call(module=module, sliding_window=window)
        return
    with pytest.raises(ConfigurationError, match=message):
        call(module=module, sliding_window=window)


def test_several_rows_are_refused() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]]).expand(2, -1)
    with pytest.raises(BatchContractError, match="must be one row"):
        tiny()(input_ids=ids, position_ids=positions, packed_sequence=_TWO, use_cache=False)


def test_attention_that_was_changed_after_set_up_is_refused() -> None:
    module = CausalLMModule(config="tiny-llama")
    module.configure_model()
    batch = pack(make_documents(4, 2))
    module.training_step(batch, 0)
    module.model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigurationError, match="must use attention `longctx`.*LlamaForCausalLM with `sdpa`"):
        module.training_step(batch, 0)


def test_a_core_that_cannot_run_here_is_refused_and_one_that_can_is_used() -> None:
    batch = pack(make_documents(4, 2))
    module = CausalLMModule(config="tiny-llama", attention_core="flex")
    module.configure_model()
    with pytest.raises(ConfigurationError, match="`flex`.*no backward on a CPU"):
        module.training_step(batch, 0)
    with pytest.raises(ConfigurationError, match="attention_core"):
        CausalLMModule(config="tiny-llama", attention_core="sdpa")
    losses = []
    for core in ("auto", "documents"):
        module = CausalLMModule(config="tiny-llama", attention_core=core)
        module.configure_model()
        losses.append(module.training_step(batch, 0)["loss"])
    assert torch.equal(*losses)


def tiny() -> Any:
    module = CausalLMModule(config="tiny-llama")
    module.configure_model()
    return module.model


@pytest.mark.slow
def test_compiled_blocks_give_the_same() -> None:
    batch = pack(make_documents(7, 1, 4))
    results = []
    for compiled in (False, True):
        module = CausalLMModule(config="tiny-llama")
        module.configure_model()
        if compiled:
            for layer in module.model.model.layers:
                layer.compile(backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler looks at what must not be looked at, and hides its warnings
            out = module.training_step(batch, 0)
        out["loss"].backward()
        results.append([out["loss"].detach(), *(parameter.grad for parameter in module.parameters())])
    for ours, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, plain)
