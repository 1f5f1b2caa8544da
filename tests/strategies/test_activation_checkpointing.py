"""Which blocks are computed again, what is kept, and that random numbers repeat."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import ConfigurationError, is_recomputing
from lightning_longctx.strategies.activation_checkpointing import (
    ActivationCheckpointing,
    apply_checkpointing,
    as_checkpointing,
)
from tests.parity.models import CONFIGS


class Counter(TorchDispatchMode):
    """Counts how often the kernel runs: below the mode that ``selective`` answers repetitions with."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += "_scaled_dot_product_flash_attention_for_cpu.default" in str(func)
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention, dropout and a list of when it ran."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), nn.Dropout(dropout)
        self.ran: list[bool] = []

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.ran.append(is_recomputing())
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # of [1, 2, T, 4]
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return x + self.dropout(attended.transpose(1, 2).flatten(2))


def build(mode: object, dropout: float = 0.0, blocks: int = 4) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(Block(dropout) for _ in range(blocks))
    apply_checkpointing(model, list(model), as_checkpointing(mode))
    return model


def run(model: nn.ModuleList) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(1, 6, 8)
    for block in model:
        x = block(x, scale=0.5)
    return x.square().sum()


@pytest.mark.parametrize(
    ("mode", "repeated"),
    [
        ("none", [0, 0, 0, 0]),
        ("full", [1, 1, 1, 1]),
        ("selective", [1, 1, 1, 1]),
        ({"mode": "every_n", "n": 2}, [1, 0, 1, 0]),
        ({"mode": "every_n", "n": 3}, [1, 0, 0, 1]),
    ],
    ids=str,
)
def test_blocks_that_run_again(mode, repeated):
    model = build(mode)
    run(model).backward()
    assert [sum(block.ran) for block in model] == repeated
    assert [block.ran.count(False) for block in model] == [1, 1, 1, 1]


@pytest.mark.parametrize("mode", ["full", "selective", {"mode": "every_n", "n": 2}], ids=str)
def test_gradients_are_the_same_also_with_dropout(mode):
    expected = build("none", dropout=0.5)
    run(expected).backward()
    model = build(mode, dropout=0.5)
    run(model).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(("mode", "calls"), [("none", 4), ("full", 8), ("selective", 4)])
def test_selective_runs_no_attention_kernel_twice(mode, calls):
    model = build(mode)
    with Counter() as counter:
        run(model).backward()
    assert counter.calls == calls


def test_nothing_is_repeated_without_gradients():
    model = build("full")
    with torch.no_grad():
        run(model)
    assert [block.ran for block in model] == [[False]] * 4


def test_hooks_of_a_block_run_once():
    model, seen = build("full"), []
    for block in model:
        block.register_forward_hook(lambda *args: seen.append(1))
    run(model).backward()
    assert len(seen) == 4


def test_a_model_that_recomputes_by_itself_is_not_doubled():
    config = dict(CONFIGS["llama"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    getattr(model, next(name for name in names if hasattr(model, name)))()
    blocks = list(model.model.layers)
    apply_checkpointing(model, blocks, ActivationCheckpointing("none"))
    with pytest.raises(ConfigurationError, match="must be none where the model recomputes.* in model and 2 more"):
        apply_checkpointing(model, blocks, ActivationCheckpointing("full"))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigurationError, match="needs repeated blocks"):
        apply_checkpointing(nn.Linear(2, 2), [], ActivationCheckpointing("full"))


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_call_around_the_repetition_is_refused(inside):
    block = nn.Linear(2, 2)
    model = nn.ModuleList([torch.compile(block, backend="eager") if inside else block])
    if not inside:
        block.compile(backend="eager")
    apply_checkpointing(model, [block], ActivationCheckpointing("none"))
    with pytest.raises(ConfigurationError, match=r"call of a block is compiled.*`block.forward = torch.compile"):
        apply_checkpointing(model, [block], ActivationCheckpointing("full"))
