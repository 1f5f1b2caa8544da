"""No document sees another and no token sees a later one, also where documents cross the border of a shard.

The row has documents of 10, 21 and 17 tokens; at sp 2 the border (24) lies inside the second, at sp 4 every shard
border (12, 24, 36) lies inside a document. Attention and dense models must not change by a bit; in a mixture of
experts the groups of tokens change size, and with them the order of summation.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx.batch import PackedSequence, model_inputs
from lightning_longctx.integrations.attention import ATTENTION_NAME
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.ulysses import Exchange, set_running_exchange, ulysses_attention
from lightning_longctx.topology import Topology
from tests.helpers.batches import packed_batch
from tests.helpers.pool import run_ranks
from tests.parity.models import CONFIGS
from tests.parity.test_mutants import glued_documents

pytestmark = pytest.mark.distributed

LENGTHS = [10, 21, 17]
FIRST, SECOND, THIRD = slice(0, 10), slice(10, 31), slice(31, 48)


def gather_row(local, group):
    """Concatenate ``[1, T/S, ...]`` of all ranks along the tokens."""
    if group is None:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def topology_of_one_row(world):
    if world == 1:
        return Topology()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    return Topology(dist.get_rank(), world, 0, 1, dist.get_rank(), world, group, group, group, group, world)


def hidden_states(name, world, changes, glued):
    """The last hidden states ``[1, T, H]`` of the row for each change ``(token, new id)``."""
    warnings.simplefilter("ignore")
    topology = topology_of_one_row(world)
    config = dict(CONFIGS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), attn_implementation=ATTENTION_NAME
    )
    outputs = []
    set_running_exchange(Exchange(topology.sp_group))
    try:
        for change in changes:
            whole = packed_batch(LENGTHS, vocab_size=64)
            if change is not None:
                whole["input_ids"][0, change[0]] = change[1]
            batch = RowSharder(topology).shard(whole, whole)
            with torch.no_grad(), glued_documents() if glued else nullcontext():
                local = model.base_model(**model_inputs(batch), use_cache=False).last_hidden_state
            outputs.append(gather_row(local, topology.sp_group))
    finally:
        set_running_exchange(None)
    return outputs


def largest_change(name, world, change, where, glued=False):
    before, after = run_ranks(hidden_states, world, name, world, [None, change], glued)[0]
    assert not torch.equal(before, after), "the change must reach its own document"
    return float((before[:, where] - after[:, where]).abs().max() / before.abs().max())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("name", "limit"), [("llama", 0.0), ("qwen3", 0.0), ("qwen3_moe", 1e-6)])
def test_a_token_of_one_document_does_not_reach_the_others(name, limit, world):
    assert largest_change(name, world, (12, 63), THIRD) <= limit
    assert largest_change(name, world, (12, 63), FIRST) <= limit


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("name", "limit"), [("llama", 0.0), ("qwen3_moe", 1e-6)])
def test_a_token_does_not_reach_earlier_ones(name, limit, world):
    assert largest_change(name, world, (27, 63), slice(0, 27)) <= limit


@pytest.mark.parametrize("world", [1, 2])
def test_glued_documents_show_up(world):
    assert largest_change("qwen3", world, (12, 63), THIRD, glued=True) > 1e-3


def attention_core(world, change):
    topology = topology_of_one_row(world)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 48, 8, generator=generator) for heads in (8, 2, 2))
    if change is not None:
        for tensor in (query, key, value):
            tensor[:, :, change] += 1.0
    length = 48 // world
    part = slice(topology.sp_rank * length, (topology.sp_rank + 1) * length)
    bounds = PackedSequence(torch.tensor([0, 10, 31, 48], dtype=torch.int32), 21)
    local = ulysses_attention(query[:, :, part], key[:, :, part], value[:, :, part], bounds, topology.sp_group)
    return gather_row(local.transpose(1, 2), topology.sp_group)  # [1, T, H, D]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_attention_core_leaks_nothing(world):
    before = run_ranks(attention_core, world, world, None)[0]
    after = run_ranks(attention_core, world, world, 12)[0]
    assert torch.equal(before[:, FIRST], after[:, FIRST])
    assert torch.equal(before[:, 10:12], after[:, 10:12])
    assert not torch.equal(before[:, 12:31], after[:, 12:31])
    assert torch.equal(before[:, THIRD], after[:, THIRD])


@pytest.mark.parametrize("world", [2, 4])
def test_the_exchange_changes_nothing(world):
    alone = run_ranks(attention_core, 1, 1, None)[0]
    assert torch.equal(run_ranks(attention_core, world, world, None)[0], alone)
