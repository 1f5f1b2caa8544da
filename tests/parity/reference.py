"""The reference of the proofs: one plain process, one document at a time, none of our parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.parity.models import CONFIGS
from tests.parity.rows import documents_of, labels_of

LEARNING_RATE = 0.1
MOMENTUM = 0.9


def plain_model(name: str, seed: int) -> torch.nn.Module:
    """The model with transformers' own eager attention, and a loop over experts where it has them."""
    config = dict(CONFIGS[name])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    if "moe" in name:
        model.set_experts_implementation("eager")
    return model


def router_loss(model: torch.nn.Module, row: int) -> torch.Tensor:
    """Transformers' load-balancing loss over all tokens of a row: the logits of its documents one after another."""
    outputs = [model(input_ids=document[None], output_router_logits=True) for document in documents_of(row)]
    layers = tuple(torch.cat(parts) for parts in zip(*(out.router_logits for out in outputs), strict=True))
    return load_balancing_loss_func(layers, model.config.num_experts, model.config.num_experts_per_tok)


def step_loss(model: torch.nn.Module, rows: list[int]) -> tuple[torch.Tensor, int]:
    """Sum of the token losses over all documents of ``rows``, and the number of targets."""
    total, targets = torch.zeros(()), 0
    for row in rows:
        for document, label in zip(documents_of(row), labels_of(row), strict=True):
            if len(document) < 2:
                continue
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, label[1:], ignore_index=-100, reduction="sum")
            targets += int((label[1:] != -100).sum())
    return total, targets


@lru_cache(maxsize=32)
def reference(name: str, rows_per_step: int, steps: int, clip: float | None = None) -> dict[str, Any]:
    """Train with SGD and return losses, the gradients of the first step, and the weights after the first and last."""
    model = plain_model(name, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        total, targets = step_loss(model, list(range(step * rows_per_step, (step + 1) * rows_per_step)))
        result["losses"].append(float(total.detach()) / targets)
        if name == "qwen3_moe_balanced":
            for row in range(step * rows_per_step, (step + 1) * rows_per_step):
                weight = model.config.router_aux_loss_coef * sum(
                    int((label[1:] != -100).sum()) for label in labels_of(row)
                )
                total = total + weight * router_loss(model, row)
        (total / targets).backward()
        if step == 0:
            result["gradients"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        result["norms"].append(float(norm))
        optimizer.step()
        if step == 0:
            result["first_weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest over parameters of max|got - expected| / max|expected|."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    return max(
        float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-30)) for name, value in expected.items()
    )
