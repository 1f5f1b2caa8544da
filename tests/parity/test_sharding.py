"""How parameters are sharded, reduced and recomputed changes no number: three steps equal one plain process, fp32."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from lightning_longctx.strategies import fsdp2, steps
from lightning_longctx.strategies.mesh import build_layout
from tests.helpers.pool import run_ranks
from tests.parity.layouts import train_layout
from tests.parity.reference import reference, relative_error
from tests.parity.test_layouts import TOLERANCE, start_weights
from tests.parity.test_mutants import PLAINLY_WRONG

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


@contextmanager
def replicas_that_never_meet():
    """Each replica reduces its gradients alone."""

    def build(device_type, sp_size, replicas):
        layout = build_layout(device_type, sp_size, replicas)
        topology = replace(layout.topology, ranks_averaged=layout.topology.world_size // replicas)
        return replace(layout, shard_mesh=layout.shard_sp, topology=topology)

    with mock.patch.object(fsdp2, "build_layout", build):
        yield


@contextmanager
def whole_parameters_on_their_own():
    """Parameters outside sharding keep each rank's own gradients."""
    with mock.patch.object(steps, "average_unsharded"):
        yield


@pytest.mark.parametrize(
    ("mutate", "options"),
    [
        (replicas_that_never_meet, {"data_parallel_replicate_size": 2}),
        (whole_parameters_on_their_own, {"sharding": {"unsharded_parameters": ["model.norm.weight"]}}),
    ],
)
def test_a_broken_part_shows_in_the_gradients(mutate, options):
    expected = reference("qwen3", 4, 1)["gradients"]
    arguments = ("qwen3", start_weights("qwen3"), 4, 2, 2, 1, None)
    broken = run_ranks(train_layout, 4, *arguments, mutate, options)[0]
    assert relative_error(broken["gradients"], expected) > PLAINLY_WRONG
    right = run_ranks(train_layout, 4, *arguments, None, options)[0]
    assert relative_error(right["gradients"], expected) <= TOLERANCE


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
