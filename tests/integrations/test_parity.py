"""Packed rows through ``CausalLMModule`` give the loss and the gradients of a plain loop over documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx.integrations import CausalLMModule, attention
from lightning_longctx.strategies.ulysses import ulysses_attention
from tests.integrations.rows import make_documents, pack, reference_loss, relative_error

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,  # large weights: attention is far from uniform, logits from zero
}
_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_FULL = {"layer_types": ["full_attention"] * 2, "pad_token_id": None, "eos_token_id": 2, "bos_token_id": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"model_type": "llama"},
    "llama-tied": _SMALL | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": _SMALL | {"model_type": "qwen3"},
    "qwen3-moe": _SMALL | _MOE | {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "granite": _SMALL | {"model_type": "granite", "logits_scaling": 6.0, "attention_multiplier": 0.3},
    "cohere": _SMALL | _FULL | {"model_type": "cohere", "logit_scale": 0.3},
    "gemma2": _SMALL | _FULL | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FAMILIES |= {
    "mistral": _SMALL | {"model_type": "mistral", "sliding_window": 4},
    "qwen2-windows": _SMALL | _WINDOWS | {"model_type": "qwen2", "use_sliding_window": True},
    "qwen3-windows": _SMALL | _WINDOWS | {"model_type": "qwen3", "use_sliding_window": True},
    "gemma2-windows": FAMILIES["gemma2"] | _WINDOWS,
}
for _name in ("cohere",):
    del FAMILIES[_name]["layer_types"]
    del FAMILIES[_name]["head_dim"]


def build(family: str, **arguments: Any) -> CausalLMModule:
    module = CausalLMModule(config=FAMILIES[family], **arguments)
    module.configure_model()
    return module


def plain_twin(module: CausalLMModule, attention: str = "eager") -> Any:
    config = AutoConfig.for_model(**module.config.to_dict())
    twin = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    twin.load_state_dict(module.model.state_dict())
    return twin


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_row_equals_document_loop(family: str) -> None:
    module = build(family, loss_chunk_tokens=5)
    twin = plain_twin(module)
    documents = make_documents(7, 1, 12, 5)
    batch = pack(documents, padding=7)

    out = module.training_step(batch, 0)
    out["loss"].backward()
    loss, per_token = reference_loss(twin, documents, batch["loss_divisor"])
    loss.backward()

    assert abs(out["loss"].item() - loss.item()) <= 1e-6 * abs(loss.item())
    assert relative_error(out["per_token_loss"][0, :25], per_token.detach()) <= 1e-5
    assert not out["per_token_loss"][0, 25:].any()
    theirs = dict(twin.named_parameters())
    for name, parameter in module.model.named_parameters():
        assert relative_error(parameter.grad, theirs[name].grad) <= 1e-5, name


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_glued_documents_differ(family: str) -> None:
    """The negative control: with the bounds of one document, the row gives another loss."""
    module = build(family)
    batch = pack(make_documents(7, 12, 5))
    apart = module.token_loss(batch).loss
    glued = batch | {"cu_seqlens": torch.tensor([0, 24], dtype=torch.int32), "max_seqlen": 24}
    assert abs(module.token_loss(glued).loss.item() - apart.item()) > 1e-3


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 0.0), ("qwen3", 0.0), ("qwen3-moe", 1e-6)])
def test_other_documents_do_not_see_a_changed_token(family: str, tolerance: float) -> None:
    module = build(family)
    batch = pack(make_documents(7, 12, 5))
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 2] = (changed["input_ids"][0, 2] + 1) % 96
    before, after = module.token_loss(batch).per_token_loss[0], module.token_loss(changed).per_token_loss[0]
    assert torch.equal(before[:1], after[:1])  # causality: position 0 precedes the change (and 1 has it as its target)
    assert (before[2:6] - after[2:6]).abs().max() > 1e-3
    assert (before[7:] - after[7:]).abs().max() <= tolerance * before.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_recompute_passes_the_bounds_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack(make_documents(7, 12, 5))
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[3])
        return ulysses_attention(*args, **kwargs)

    monkeypatch.setattr(attention, "ulysses_attention", counted)
    results = []
    for recompute in (False, True):
        module = build(family)
        if recompute:
            # the second name is that of transformers before 5.20
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            getattr(module.model, next(name for name in names if hasattr(module.model, name)))()
        calls.clear()
        module.training_step(batch, 0)["loss"].backward()
        assert len(calls) == (4 if recompute else 2)  # two layers, twice with recompute
        assert all(bounds.cu_seqlens is batch["cu_seqlens"] for bounds in calls)
        results.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, grad in results[0].items():
        assert torch.equal(grad, results[1][name]), name


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_row_without_targets_gives_zero(family: str) -> None:
    module = build(family)
    batch = pack(make_documents(6, 3))
    batch["shift_labels"] = torch.full_like(batch["shift_labels"], -100)
    out = module.training_step(batch, 0)
    out["loss"].backward()
    assert out["loss"].item() == 0.0
    assert all(not p.grad.any() for p in module.parameters())


def test_evaluation_and_prediction_score_the_same() -> None:
    module = build("llama")
    batch = pack(make_documents(7, 12, 5))
    train = module.training_step(batch, 0)["per_token_loss"]
    with torch.no_grad():
        assert torch.equal(module.validation_step(batch, 0)["per_token_loss"], train)
        assert torch.equal(module.test_step(batch, 0)["per_token_loss"], train)
        scores = module.predict_step(batch, 0)
    assert torch.equal(scores["per_token_loss"], train)
    assert scores["cu_seqlens"].tolist() == [0, 7, 19, 24]
