"""The published ladder of Arctic Long Sequence Training, from this suite's features: order, and a factor of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_longctx.batch import model_inputs
from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.integrations.head import head_of
from lightning_longctx.tools.plan.reading import Run
from lightning_longctx.tools.plan.search import Planner
from lightning_longctx.tools.plan.step import Step
from lightning_longctx.units import GIB
from tests.tools.plan.helpers import settings, shapes

#: Llama-3.1-8B, written by hand.
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 2**23,
}
K, M = 1_000, 1_000_000


class WholeLogits(CausalLMModule):
    """The loss as most code has it: all logits of a row, in float32."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.model is not None
        hidden = self.model.base_model(**model_inputs(batch), use_cache=False).last_hidden_state
        logits = torch.nn.functional.linear(hidden, head_of(self.model).weight).float()
        return cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


FULL = {"activation_checkpointing": "full"}
ULYSSES = {**FULL, "sequence_parallel_size": 8}
OFFLOAD = {**ULYSSES, "activation_offload": "async"}
LADDER: list[tuple[str, type[CausalLMModule], dict[str, Any], int]] = [
    ("none", WholeLogits, FULL, 32 * K),
    ("chunked loss", CausalLMModule, FULL, 160 * K),
    ("Ulysses", CausalLMModule, ULYSSES, 1_100 * K),
    ("offload", CausalLMModule, OFFLOAD, 2_400 * K),
    ("all", CausalLMModule, {**OFFLOAD, "tiled_mlp": "auto"}, 3_700 * K),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ladder_in_order_and_within_a_factor_of_two() -> None:
    ours: list[int] = []
    for name, kind, switches, published in LADDER:
        module = shapes(LLAMA_8B, kind)
        wanted = settings(module, 8, **switches)
        run = Run(module, wanted, Step(published // 2048 * 2048, "bf16-true"), 8, "")
        ours.append(Planner(run, 80 * GIB).longest(wanted))
        print(f"{name}: {ours[-1]:,} tokens, published {published:,}, {ours[-1] / published:.2f} times")
        assert 0.5 < ours[-1] / published < 2, name
    assert ours == sorted(ours)
    assert len(set(ours)) == len(ours)
