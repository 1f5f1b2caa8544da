"""How parameters are sharded, reduced and recomputed changes no number: three steps equal one plain process, fp32."""

from __future__ import annotations

import pytest

from tests.helpers.pool import run_ranks
from tests.parity.layouts import train_layout
from tests.parity.reference import reference, relative_error
from tests.parity.test_layouts import TOLERANCE, start_weights

pytestmark = pytest.mark.distributed

STEPS = 3


def check(name, world, sp, accumulate, options, clip=None):
    expected = reference(name, (world // sp) * accumulate, STEPS, clip)
    arguments = (name, start_weights(name), world, sp, accumulate, STEPS, clip, None, options)
    ranks = run_ranks(train_layout, world, *arguments)
    got = ranks[0]
    assert relative_error(got["gradients"], expected["gradients"]) <= TOLERANCE
    assert relative_error(got["weights"], expected["weights"]) <= TOLERANCE
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert all(rank["losses"] == got["losses"] for rank in ranks)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("world", "sp", "replicas"), [(2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4)])
def test_replicas_of_sharded_parameters(name, world, sp, replicas):
    check(name, world, sp, 2, {"data_parallel_replicate_size": replicas})


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_reduced_in_the_last_micro_batch_only(replicas):
    options = {"data_parallel_replicate_size": replicas, "sharding": {"reduce_gradients": "last_micro_batch"}}
    check("qwen3", 4, 2, 3, options)


@pytest.mark.parametrize(
    "sharding",
    [
        {"reshard_after_forward": False},
        {"prefetch": 2},
        {"offload_parameters": True},
        {"blocks": ["model.layers.*"]},
        {"blocks": ["Qwen3MLP"]},
    ],
    ids=str,
)
def test_gathering(sharding):
    check("qwen3", 4, 2, 1, {"sharding": sharding})


@pytest.mark.parametrize("clip", [None, 0.1])
def test_parameters_outside_sharding_are_reduced_and_clipped(clip):
    sharding = {"unsharded_parameters": ["model.norm.weight", "layers.*.q_norm.weight"]}
    check("qwen3", 4, 2, 2, {"sharding": sharding}, clip)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", ["full", "selective", {"mode": "every_n", "n": 2}], ids=str)
def test_activation_checkpointing(name, checkpointing):
    check(name, 2, 2, 2, {"activation_checkpointing": checkpointing})


def test_checkpointing_with_replicas_and_late_reduction():
    options = {
        "data_parallel_replicate_size": 2,
        "activation_checkpointing": "full",
        "sharding": {"reduce_gradients": "last_micro_batch", "prefetch": 2},
    }
    check("qwen3_moe", 4, 2, 3, options)
