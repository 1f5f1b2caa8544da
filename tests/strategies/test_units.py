"""The strategy's pure parts: blocks, rows, precision, heads."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import BatchContractError, ConfigurationError
from lightning_longctx.strategies.agreement import _hash
from lightning_longctx.strategies.mesh import check_world
from lightning_longctx.strategies.precision import FSDP2Precision
from lightning_longctx.strategies.rows import RowSharder
from lightning_longctx.strategies.shard import find_blocks
from lightning_longctx.strategies.ulysses import check_heads
from lightning_longctx.topology import Topology
from tests.helpers.batches import packed_batch
from tests.parity.models import CONFIGS


def hugging_face_model(name):
    config = dict(CONFIGS[name])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_divisor_of_the_world_is_a_layout(world):
    for sp in range(1, 9):
        if world % sp:
            with pytest.raises(ConfigurationError, match=re.escape(f"leaves {world % sp}")):
                check_world(world, sp)
        else:
            check_world(world, sp)


@pytest.mark.parametrize(
    ("heads", "sp", "fine"), [(8, 4, True), (8, 8, True), (8, 3, False), (6, 4, False), (4, 8, False)]
)
def test_heads(heads, sp, fine):
    if fine:
        check_heads(heads, sp)
    else:
        with pytest.raises(ConfigurationError, match=f"{heads} / {sp} leaves {heads % sp}"):
            check_heads(heads, sp)


def test_blocks_of_a_hugging_face_model_are_its_decoder_layers():
    blocks = find_blocks(hugging_face_model("qwen3_moe"))
    assert [type(block).__name__ for block in blocks] == ["Qwen3MoeDecoderLayer"] * 2


class Experts(nn.Module):
    """A layer whose list of experts is longer than the list of layers."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))


class Tower(nn.Module):
    """A short list of large layers, and a small list beside it."""

    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.layers = nn.ModuleList(Experts() for _ in range(2))


def test_blocks_of_an_own_model_are_the_outermost_list_with_the_most_parameters():
    assert [type(block).__name__ for block in find_blocks(Tower())] == ["Experts", "Experts"]


def test_blocks_by_name():
    assert len(find_blocks(Tower(), ["Linear"])) == 9 + 12
    with pytest.raises(ConfigurationError, match="must name classes of submodules or match their paths") as caught:
        find_blocks(Tower(), ["DecoderLayer"])
    assert "DecoderLayer" in str(caught.value)


def test_a_model_without_repeated_blocks_has_none():
    assert find_blocks(nn.Linear(2, 2)) == []


def test_the_hash_sees_values_order_and_dtype():
    tensor = torch.arange(6.0)
    assert _hash(tensor) == _hash(tensor.clone())
    assert _hash(tensor) != _hash(tensor.flip(0))
    assert _hash(tensor) != _hash(tensor + torch.tensor([0, 0, 0, 0, 0, 1e-6]))
    assert _hash(tensor.bfloat16()) != _hash(tensor.bfloat16() * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float32])
def test_the_hash_of_a_view_is_that_of_its_values_wherever_it_begins(dtype):
    tensor = torch.arange(9).remainder(2).to(dtype)
    assert _hash(tensor[1:]) == _hash(tensor[1:].clone())


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_shards_put_together_are_the_row(sp):
    row = packed_batch([7, 9, 16])
    shards = [RowSharder(Topology(sp_rank=rank, sp_size=sp)).shard(row, row) for rank in range(sp)]
    for key in ("input_ids", "shift_labels", "position_ids", "source_ids"):
        assert torch.equal(torch.cat([shard[key] for shard in shards], dim=1), row[key])
        assert all(shard[key].shape == (1, 32 // sp) for shard in shards)
    for key in ("cu_seqlens", "document_keys", "max_seqlen", "loss_divisor"):
        assert all(shard[key] is row[key] for shard in shards)


def test_labels_are_shifted_once():
    row = packed_batch([8, 8])
    row["input_ids"] = torch.arange(16)[None]
    row["shift_labels"] = torch.where(row["shift_labels"] == -100, -100, torch.arange(1, 17))
    shards = [RowSharder(Topology(sp_rank=rank, sp_size=2)).shard(row, row) for rank in range(2)]
    for shard in shards:
        trained = shard["shift_labels"] != -100
        assert torch.equal(shard["shift_labels"][trained], shard["input_ids"][trained] + 1)


def test_a_row_is_not_sliced_twice():
    row = packed_batch([8, 8])
    shard = RowSharder(Topology(sp_rank=0, sp_size=2)).shard(row, row)
    with pytest.raises(BatchContractError, match=r"input_ids.*must be int64 \[1, 16\]"):
        RowSharder(Topology(sp_rank=0, sp_size=2)).shard(shard, shard)


def test_a_row_that_sp_does_not_divide_is_refused():
    row = packed_batch([7])
    with pytest.raises(BatchContractError, match="sequence_parallel_size = 2 divides"):
        RowSharder(Topology(sp_rank=0, sp_size=2)).shard(row, row)


def test_any_batch_passes_without_sequence_parallelism():
    assert RowSharder(Topology()).shard("anything", "anything") == "anything"


# -- precision -------------------------------------------------------------------------------------------------------


def test_rotary_angles_at_a_million_tokens_stay_exact_in_bfloat16():
    plugin = FSDP2Precision("bf16-true")
    model = plugin.convert_module(hugging_face_model("qwen3"))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    positions = torch.tensor([[0, 1000, 2**20 - 1]])
    with plugin.forward_context():
        cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 64, dtype=torch.float32), positions)
    theta = model.config.rope_parameters["rope_theta"]
    frequencies = theta ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.cat([positions[0, :, None].double() * frequencies] * 2, dim=-1)
    # float32 angles of up to 2^20 carry an error of 2^20 * 2^-24, a sixteenth
    assert (cos[0].double() - angles.cos()).abs().max() < 0.07
    assert (sin[0].double() - angles.sin()).abs().max() < 0.07
    low = hugging_face_model("qwen3").bfloat16().model.rotary_emb(torch.zeros(1, 3, 64), positions)[0]
    assert (low[0].double() - angles.cos()).abs().max() > 0.5, "the whole cast is what must not happen"


@pytest.mark.parametrize(
    ("precision", "stored", "used"),
    [
        ("32-true", torch.float32, None),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.float32, torch.bfloat16),
    ],
)
def test_precision(precision, stored, used):
    plugin = FSDP2Precision(precision)
    assert plugin.convert_module(nn.Linear(2, 2)).weight.dtype == stored
    policy = plugin.policy()
    assert policy.param_dtype == used
    assert policy.reduce_dtype == (torch.float32 if used else None)
    assert policy.output_dtype is None
    with plugin.forward_context():
        assert torch.get_default_dtype() == torch.float32
        assert not torch.is_autocast_enabled("cpu")
