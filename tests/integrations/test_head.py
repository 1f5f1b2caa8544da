"""The head check: scales and caps are found, everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.head import HeadTransform, head_loss, inspect_model
from tests.integrations.rows import make_documents, pack, relative_error
from tests.integrations.test_parity import FAMILIES


def make_model(family: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(**(FAMILIES[family] | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="longctx")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", HeadTransform()),
        ("llama-tied", HeadTransform()),
        ("qwen3", HeadTransform()),
        ("qwen3-moe", HeadTransform()),
        ("granite", HeadTransform(scale=1 / 6)),
        ("cohere", HeadTransform(scale=0.3)),
        ("gemma2", HeadTransform(cap=3.0)),
    ],
)
def test_transform_is_found(family: str, expected: HeadTransform) -> None:
    model = make_model(family)
    model.train()
    assert inspect_model(model) == expected
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_published_cap_shows_although_logits_are_small() -> None:
    """A cap of 30 changes logits of 0.07 by 1e-7: without scaled inputs it would pass for no cap."""
    assert inspect_model(make_model("gemma2", final_logit_softcapping=30.0, initializer_range=0.001)).cap == 30.0


class _ShiftedHead(LlamaForCausalLM):
    """A head that does what no key of the configuration says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 0.5
        return out


class _MixingNorm(nn.Module):
    """A causal average over neighbours: a token mixer that is not attention, as in hybrid models."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.norm(hidden + 0.1 * shifted)


def test_unknown_head_is_refused() -> None:
    config = AutoConfig.for_model(**FAMILIES["llama"])
    model = _ShiftedHead._from_config(config, attn_implementation="longctx")
    with pytest.raises(ConfigurationError, match="_ShiftedHead, whose logits differ by up to 0.5"):
        inspect_model(model)


def test_layer_that_mixes_tokens_is_refused() -> None:
    model = make_model("llama")
    layer = model.model.layers[1]
    layer.post_attention_layernorm = _MixingNorm(layer.post_attention_layernorm)
    with pytest.raises(ConfigurationError, match="mix tokens only in attention"):
        inspect_model(model)


def test_other_attention_is_refused() -> None:
    config = AutoConfig.for_model(**FAMILIES["llama"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with pytest.raises(ConfigurationError, match="which never called it"):
        inspect_model(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96},
            "never called|attention_mask",
        ),
        (
            {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
            "never called",
        ),
    ],
)
def test_families_that_attend_otherwise_are_refused(values: dict[str, Any], message: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="longctx")
    with pytest.raises(ConfigurationError, match=message):
        inspect_model(model)


def test_window_that_does_not_reach_the_attention_is_refused() -> None:
    """As in a model that puts its window into the mask alone."""
    model = make_model("mistral")
    assert inspect_model(model) == HeadTransform()
    model.config.sliding_window = 5
    for layer in model.model.layers:
        layer.self_attn.config = AutoConfig.for_model(**FAMILIES["mistral"] | {"sliding_window": None})
        layer.self_attn.config._attn_implementation = "longctx"
    with pytest.raises(ConfigurationError, match=r"sliding window of its configuration \(5\).*ask for \['None'\]"):
        inspect_model(model)


@pytest.mark.parametrize("chunk", [1, 7, 10, 24, 100])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_chunks_do_not_change_the_loss(chunk: int, cap: float | None) -> None:
    head, transform = nn.Linear(8, 96), HeadTransform(0.7, cap)
    batch, hidden = pack(make_documents(7, 12, 5)), torch.randn(1, 24, 8, requires_grad=True)
    out = head_loss(transform, head, hidden, batch, chunk)
    out.loss.backward()
    grads = [hidden.grad, head.weight.grad, head.bias.grad]

    copy, twin = hidden.detach().requires_grad_(), nn.Linear(8, 96)
    twin.load_state_dict(head.state_dict())
    logits = twin(copy)[0] * 0.7
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    each = nn.functional.cross_entropy(logits, batch["shift_labels"][0], reduction="none")
    (each.sum() / batch["loss_divisor"]).backward()

    assert relative_error(out.per_token_loss[0], each.detach()) <= 1e-6
    assert out.mean.item() == pytest.approx((each.sum() / 21).item(), rel=1e-6)
    for ours, theirs in zip(grads, [copy.grad, twin.weight.grad, twin.bias.grad], strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_a_capped_head_accumulates_in_float32_over_chunks() -> None:
    """2,048 chunks that each add the same amount: a bfloat16 running sum stops growing at 256 of them."""
    tokens, head = 2048, nn.Linear(1, 2).bfloat16()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    batch = {"shift_labels": torch.zeros(1, tokens, dtype=torch.int64), "loss_divisor": 1}
    hidden = torch.ones(1, tokens, 1, dtype=torch.bfloat16)
    head_loss(HeadTransform(cap=30.0), head, hidden, batch, chunk_tokens=1).loss.backward()
    for gradient in (head.weight.grad, head.bias.grad):
        assert gradient.flatten().tolist() == [-0.5 * tokens, 0.5 * tokens]
