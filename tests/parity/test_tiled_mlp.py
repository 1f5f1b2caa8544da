"""Tiles change no number: three steps equal one plain process, with checkpointing, offload and any sharding."""

from __future__ import annotations

import pytest

from tests.parity.test_sharding import check

pytestmark = pytest.mark.distributed

OFFLOAD = {"mode": "async", "min_tensor_mib": 0}


@pytest.mark.parametrize(("world", "sp", "accumulate"), [(2, 1, 1), (2, 2, 2), (4, 2, 2)])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_tiles_in_every_layout(world, sp, accumulate, checkpointing):
    options = {"tiled_mlp": {"tiles": 3}, "activation_checkpointing": checkpointing}
    check("llama", world, sp, accumulate, options)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "full", "activation_offload": OFFLOAD},
        {"activation_checkpointing": "selective", "activation_offload": {**OFFLOAD, "level": "policy"}},
        {"activation_offload": {**OFFLOAD, "level": "all"}},
        {"sharding": {"blocks": ["Qwen3MLP"]}},
        {"data_parallel_replicate_size": 2, "sharding": {"reduce_gradients": "last_micro_batch"}},
        {"sharding": {"reshard_after_forward": False}},
    ],
    ids=str,
)
def test_tiles_with_everything_else(options):
    check("qwen3", 2, 1 if "data_parallel_replicate_size" in options else 2, 2, {"tiled_mlp": {"tiles": 5}, **options})


def test_a_module_with_units_inside_is_refused():
    with pytest.raises(Exception, match="must name modules without FSDP units inside"):
        check("qwen3", 2, 1, 1, {"tiled_mlp": {"tiles": 2}, "sharding": {"blocks": ["*.gate_proj"]}})
