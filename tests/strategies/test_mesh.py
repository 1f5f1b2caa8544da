"""Layouts: which sizes fit, who is where, and groups that cross nodes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy
from lightning_longctx.strategies.mesh import build_layout, check_world, describe_layout, node_crossings
from tests.helpers.pool import run_ranks


@pytest.mark.parametrize(
    ("world", "sp", "replicas", "arithmetic"),
    [
        (8, 3, 1, r"8 / 3 leaves 2"),
        (8, 2, 3, r"3 for 8 / 2 = 4 ranks \(4 / 3 leaves 1\)"),
        (4, 4, 2, r"2 for 4 / 4 = 1 rank \(1 / 2 leaves 1\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic(world, sp, replicas, arithmetic):
    with pytest.raises(ConfigurationError, match=arithmetic):
        check_world(world, sp, replicas)


def test_replicas_that_do_not_fit_are_refused_when_the_trainer_is_built():
    strategy = LongContextFSDPStrategy(sequence_parallel_size=2, data_parallel_replicate_size=3)
    with pytest.raises(ConfigurationError, match="3 for 8 / 2 = 4 ranks"):
        Trainer(accelerator="cpu", devices=4, num_nodes=2, strategy=strategy, logger=False)


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "2"])
def test_replicas_must_be_a_positive_int(size):
    with pytest.raises(ConfigurationError, match="data_parallel_replicate_size.*must be a positive int"):
        check_world(8, 1, size)


@pytest.mark.parametrize(
    ("world", "sp", "per_node", "crossing"),
    [(16, 8, 8, []), (16, 4, 8, []), (12, 4, 6, [[4, 5, 6, 7]]), (8, 8, 4, [list(range(8))]), (8, 1, 3, [])],
)
def test_groups_that_cross_nodes_are_found(world, sp, per_node, crossing):
    assert node_crossings(world, sp, per_node) == crossing


def test_the_table_shows_every_rank_and_warns():
    lines = describe_layout(12, 4, 3, 6).splitlines()
    assert "data_parallel_replicate 3 x data_parallel_shard 1 x sequence_parallel 4" in lines[0]
    assert [line.split()[0] for line in lines[2:14]] == [str(rank) for rank in range(12)]
    assert lines[2 + 6].split() == ["6", "1", "1", "0", "2", "4-7"]  # rank, node, replica, shard, place, peers
    assert lines[14].startswith("warning: ranks 4-7 share a row across nodes")
    assert len(lines) == 15


def layout_of_this_rank(sp, replicas):
    dist.init_process_group("gloo")
    layout = build_layout("cpu", sp, replicas)
    topology = layout.topology
    group = [] if topology.sp_group is None else dist.get_process_group_ranks(topology.sp_group)
    return {
        "axes": dict(zip(layout.mesh.mesh_dim_names, layout.mesh.shape, strict=True)),
        "dp": (topology.dp_rank, topology.dp_size),
        "sp": (topology.sp_rank, topology.sp_size),
        "row": group,
        "data_parallel": dist.get_process_group_ranks(layout.data_parallel.get_group()),
        "shard_sp": dist.get_process_group_ranks(layout.shard_sp.get_group()),
        "dp_sp": dist.get_process_group_ranks(layout.dp_sp.get_group()),
        "shard_mesh": layout.shard_mesh.mesh_dim_names,
        "averaged": topology.ranks_averaged,
    }


@pytest.mark.distributed
def test_two_replicas_of_two_ranks_that_share_a_row():
    seen = run_ranks(layout_of_this_rank, 4, 2, 2)
    for rank, facts in enumerate(seen):
        assert facts["axes"] == {"data_parallel_replicate": 2, "data_parallel_shard": 1, "sequence_parallel": 2}
        assert facts["dp"] == (rank // 2, 2), "data-parallel ranks count over replicas and shards"
        assert facts["sp"] == (rank % 2, 2)
        assert facts["row"] == facts["shard_sp"] == [rank // 2 * 2, rank // 2 * 2 + 1], "ranks of a row are adjacent"
        assert facts["data_parallel"] == [rank % 2, rank % 2 + 2]
        assert facts["dp_sp"] == [0, 1, 2, 3]
        assert facts["shard_mesh"] == ("data_parallel_replicate", "shard_sp")
        assert facts["averaged"] == 4


@pytest.mark.distributed
def test_without_replicas_parameters_are_cut_over_every_rank():
    for rank, facts in enumerate(run_ranks(layout_of_this_rank, 4, 2, 1)):
        assert facts["axes"] == {"data_parallel_replicate": 1, "data_parallel_shard": 2, "sequence_parallel": 2}
        assert facts["shard_mesh"] == ("shard_sp",)
        assert facts["shard_sp"] == [0, 1, 2, 3]
        assert facts["dp"] == (rank // 2, 2)
