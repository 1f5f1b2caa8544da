"""Every kind of head under sharding: one step on two ranks of a row gives the weights that one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy, Topology, model_inputs
from lightning_longctx.integrations import CausalLMModule, OptimizerSettings
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.ulysses import Exchange, set_running_exchange
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.integrations.rows import make_documents, pack, relative_error
from tests.integrations.test_parity import FAMILIES

#: With its load-balancing loss, whose router logits leave the recomputed blocks beside their outputs.
CONFIGS = FAMILIES | {"qwen3-moe-balanced": FAMILIES["qwen3-moe"] | {"router_aux_loss_coef": 0.5}}


def train(family: str, world_size: int, recompute: bool) -> dict[str, torch.Tensor]:
    # eps is large so that AdamW's first step is proportional to the gradient and shows its size, not only its sign
    settings = OptimizerSettings(lr=0.1, eps=1.0, weight_decay=0.0)
    module = CausalLMModule(config=CONFIGS[family], optimizer=settings, loss_chunk_tokens=5)
    module.configure_model()
    if recompute:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        getattr(module.model, next(name for name in names if hasattr(module.model, name)))()
    trainer = quiet_trainer(
        devices=world_size,
        max_steps=1,
        limit_val_batches=0,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=world_size),
    )
    rows = DataLoader([pack(make_documents(7, 1, 12, 5), padding=7)], batch_size=None)
    trainer.fit(module, rows, rows)
    named: Any = module.named_parameters()
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named}
    return {name: value.detach().clone() for name, value in whole.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "family", ["llama-tied", "qwen3-moe", "qwen3-moe-balanced", "cohere", "gemma2-windows", "mistral"]
)
def test_two_ranks_of_a_row_equal_one_process(family: str, recompute: bool) -> None:
    start = CausalLMModule(config=CONFIGS[family])
    start.configure_model()
    alone = run_ranks(train, 1, family, 1, recompute)[0]
    together = run_ranks(train, 2, family, 2, recompute)
    for name, before in start.named_parameters():
        step = alone[name] - before.detach()
        assert step.abs().max() > 0, name
        for rank in together:
            assert relative_error(rank[name] - before.detach(), step) <= 1e-4, name


def call_without_positions() -> str:
    """One document over the row: the first shard's own count is right, and it must not wait for the second."""
    dist.init_process_group("gloo")
    module = CausalLMModule(config="tiny-llama")
    module.configure_model()
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = pack(make_documents(12))
    batch = RowSharder(Topology(rank, 2, 0, 1, rank, 2, group, group, group, group, 2)).shard(whole, whole)
    inputs = model_inputs(batch)
    set_running_exchange(Exchange(group))
    try:
        module.model(**inputs, use_cache=False)
        del inputs["position_ids"]
        fresh = CausalLMModule(config="tiny-llama")
        fresh.configure_model()
        fresh.model(**inputs, use_cache=False)
    except ConfigurationError as error:
        return str(error)
    finally:
        set_running_exchange(None)
    return "no error"


@pytest.mark.distributed
def test_positions_that_a_model_counts_on_its_shard_are_refused_on_every_rank() -> None:
    first, second = run_ranks(call_without_positions, 2)
    assert "others on another rank of the row" in first
    assert "0 at token 6 of the row" in second
