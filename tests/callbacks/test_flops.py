"""Operations of a model against PyTorch's own counter, which runs it and adds up each matrix multiplication."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_longctx.callbacks.flops import ModelFlops, model_flops

LAYERS, HEADS, DIM, WIDTH, VOCABULARY, TOKENS = 2, 3, 4, 10, 13, 7


class Model(nn.Module):
    """Two layers of attention and a head, written as matrix multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * HEADS * DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * DIM, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attention_width = LAYERS * HEADS * DIM

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(0, 1) for part in qkv(x).chunk(3, -1))
            x = x + out(((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).flatten(1))
        return self.head(x)


def _counted(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)).sum().backward()
    return counter.get_total_flops()


def test_matrices_and_attention_are_those_that_a_run_counts() -> None:
    flops = model_flops(Model())
    assert flops is not None
    # This attention computes the full square of one document, of which causal attention needs half.
    assert flops.of(TOKENS, 2 * TOKENS**2) == _counted(Model())


def test_frozen_matrices_have_no_weight_gradient() -> None:
    model = Model()
    model.head.requires_grad_(False)
    flops = model_flops(model)
    assert flops is not None
    assert flops.of(TOKENS, 2 * TOKENS**2) == _counted(model)


def test_documents_cost_their_own_squares() -> None:
    flops = ModelFlops(per_token=2.0, per_squared_length=3.0)
    assert flops.of(10, 6**2 + 4**2) == 20 + 3 * 52


def test_a_head_that_shares_its_weight_with_the_table_counts_once() -> None:
    model = Model()
    apart = model_flops(model)
    model.head.weight = model.table.weight
    assert model_flops(model) == apart


class _Experts(nn.Module):
    """Two layers as Hugging Face lays them out: fused experts, a router and a shared expert."""

    def __init__(self, **names: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_hidden_layers=2, num_attention_heads=4, hidden_size=16, head_dim=None, **names
        )
        self.mlp = nn.ModuleDict(
            {"router": nn.Linear(16, 8, bias=False), "shared_expert": nn.Linear(16, 5, bias=False)}
        )
        self.mlp["experts"] = nn.ParameterDict({"up": nn.Parameter(torch.zeros(8, 16, 6))})


@pytest.mark.parametrize(
    ("names", "share"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"n_routed_experts": 8, "num_experts_per_tok": 4}, 0.5),
        ({"num_local_experts": 8, "num_experts_per_tok": 1}, 0.125),
        ({}, 1.0),
    ],
)
def test_only_the_experts_that_a_token_takes_count(names: dict[str, int], share: float) -> None:
    dense = 16 * 8 + 16 * 5
    expected = ModelFlops(6 * (dense + share * 8 * 16 * 6), 6.0 * 2 * 4 * 4)
    assert model_flops(_Experts(**names)) == expected


def test_without_the_size_of_attention_nothing_is_claimed() -> None:
    assert model_flops(nn.Linear(3, 4)) is None


def test_latent_attention_has_keys_and_values_of_two_widths() -> None:
    module = _Experts(qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)
    flops = model_flops(module)
    assert flops is not None
    # Scores take 16 products an entry and the sum over values 8: on average 12, for 4 heads in 2 layers.
    assert flops.per_squared_length == 6 * 2 * 4 * 12
