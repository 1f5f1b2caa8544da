"""The load-balancing loss of a row: its value, padding, what is refused. Its gradients in layouts: tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.integrations.router_loss import RouterLoss, find_router_loss, wants_router_loss
from tests.integrations.rows import make_documents, pack
from tests.integrations.test_parity import FAMILIES


def layers(tokens: int, experts: int = 4) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(tokens, experts, requires_grad=True) for _ in range(3))


def test_value_and_gradient_are_those_of_transformers_without_the_padding() -> None:
    batch = pack(make_documents(7, 5), padding=6)
    logits = layers(18)
    ours = RouterLoss(4, 2, 0.25)(logits, batch)
    mask = torch.tensor([[1] * 12 + [0] * 6])
    theirs = 0.25 * load_balancing_loss_func(logits, 4, 2, mask) * 10 / 18  # 10 targets of a divisor of 18
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for got, expected in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_row_of_padding_gives_zero() -> None:
    batch = pack(make_documents(4), padding=4)
    batch["source_ids"] = torch.full_like(batch["source_ids"], -1)
    batch["shift_labels"] = torch.full_like(batch["shift_labels"], -100)
    assert RouterLoss(4, 2, 0.25)(layers(8), batch).item() == 0.0


@pytest.mark.parametrize(
    ("config", "given", "wanted"),
    [
        ({}, {}, False),  # a coefficient alone is in every published configuration
        ({"output_router_logits": True}, {}, True),
        ({}, {"router_aux_loss_coef": 0.01}, True),
        ({}, {"router_aux_loss_coef": 0.0}, False),
        ({}, {"router_aux_loss_coef": 0.01, "output_router_logits": False}, False),
    ],
)
def test_when_it_is_wanted(config: dict[str, Any], given: dict[str, Any], wanted: bool) -> None:
    assert wants_router_loss(AutoConfig.for_model("qwen3_moe", **config), given) is wanted


def build(**overrides: Any) -> CausalLMModule:
    module = CausalLMModule(config=FAMILIES["qwen3-moe"], config_overrides=overrides)
    module.configure_model()
    return module


def test_training_has_the_term_and_evaluation_has_not() -> None:
    batch = pack(make_documents(7, 12), padding=5)
    plain, balanced = build(), build(router_aux_loss_coef=0.1)
    assert plain.router_loss is None
    assert "extra_terms" not in plain.training_step(batch, 0)
    out = balanced.training_step(batch, 0)
    term = out["extra_terms"]["router_aux_loss"]
    assert term.item() > 0
    per_token = out["per_token_loss"].sum() / batch["loss_divisor"]
    torch.testing.assert_close(out["loss"] - term, per_token)
    assert torch.equal(balanced.validation_step(batch, 0)["loss"], plain.validation_step(batch, 0)["loss"])


def test_the_model_is_asked_what_its_own_loss_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build().model
    assert find_router_loss(model) == RouterLoss(4, 2, 0.001)
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    own = modeling_qwen3_moe.load_balancing_loss_func
    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", lambda *args: own(*args) * 1.01)
    with pytest.raises(ConfigurationError, match="load-balancing loss of Switch Transformer"):
        find_router_loss(model)


def test_a_dense_model_has_none() -> None:
    module = CausalLMModule(config=FAMILIES["llama"])
    module.configure_model()
    with pytest.raises(ConfigurationError, match="needs a router loss"):
        find_router_loss(module.model)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_one_by_one_and_grouped_give_the_same(experts: str) -> None:
    batch = pack(make_documents(7, 12, 1))
    default, other = build(), build()
    assert default.model.config._experts_implementation == "grouped_mm"
    other.model.set_experts_implementation(experts)
    results = []
    for module in (default, other):
        module.training_step(batch, 0)["loss"].backward()
        results.append({name: parameter.grad for name, parameter in module.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-5, atol=1e-7)
