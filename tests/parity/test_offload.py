"""Activation offload changes no bit: losses, gradients and weights of two steps, in every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.parity.layouts import train_layout
from tests.parity.test_layouts import start_weights

pytestmark = pytest.mark.distributed

#: Levels that can act, by checkpointing.
LEVELS = {
    "none": ["boundary", "all"],
    "full": ["boundary"],
    "selective": ["boundary", "policy"],
    "every_n": ["boundary", "all"],
}
BASE = {"min_tensor_mib": 0}


def _compare(name, weights, world, sp, accumulate, checkpointing, offloads):
    """Train without offload, then with each; a run that moves nothing raises by itself."""
    options = {"activation_checkpointing": checkpointing}
    expected = train_layout(name, weights, world, sp, accumulate, 2, options=options)
    different = []
    for offload in offloads:
        options["activation_offload"] = offload
        got = train_layout(name, weights, world, sp, accumulate, 2, options=options)
        equal = got["losses"] == expected["losses"]
        for part in ("gradients", "weights"):
            for key, value in expected.get(part, {}).items():
                equal &= torch.equal(got[part][key], value)
        if not equal:
            different.append(offload)
    return different, len(expected.get("gradients", {}))


def check(name, world, sp, accumulate, checkpointing, offloads):
    results = run_ranks(_compare, world, name, start_weights(name), world, sp, accumulate, checkpointing, offloads)
    assert [different for different, _ in results] == [[]] * world
    assert results[0][1] > 10


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_offload_changes_no_bit(name, checkpointing, sp, accumulate):
    choices = itertools.product(["sync", "async"], LEVELS[checkpointing])
    offloads = [{"mode": mode, "level": level, "keep_last_blocks": 0, **BASE} for mode, level in choices]
    check(name, 2, sp, accumulate, checkpointing, offloads)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_four_ranks_replicas_and_limits(name):
    offloads = [
        {"mode": "async", "keep_last_blocks": 1, "prefetch_mib": 0, **BASE},
        {"mode": "sync", "device_limit_gib": 1e-6, "keep_last_blocks": 0, **BASE},
        {"mode": "async", "modules": ["layers.0"], "keep_last_blocks": 0, **BASE},
    ]
    check(name, 4, 2, 2, "full", offloads)
