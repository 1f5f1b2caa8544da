"""Which rank does what: data-parallel replicas times sequence-parallel shards, with the groups that go with them.

Ranks of one sequence-parallel group are adjacent, so that they sit inside a node, where the exchanges of every layer
belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import HOST_TIMEOUT, Topology

__all__ = ["Layout", "build_layout", "check_world"]


@dataclass(frozen=True)
class Layout:
    """The meshes of a run and what each rank is in them.

    Attributes:
        mesh: axes ``data_parallel`` x ``sequence_parallel``; what a module sees as ``self.device_mesh``.
        shard_mesh: over which parameters are sharded: all ranks, one axis ``shard_sp``. It covers the
            sequence-parallel ranks too, or their gradients would never meet.
        topology: the same facts for every other part of the suite.
    """

    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    topology: Topology


def check_world(world_size: int, sequence_parallel_size: int) -> None:
    """Check that the ranks can be laid out, before any process group exists.

    Args:
        world_size: number of processes.
        sequence_parallel_size: ranks that share a row.

    Raises:
        ConfigurationError: ``sequence_parallel_size`` is not a positive divisor of ``world_size``.
    """
    if (
        isinstance(sequence_parallel_size, bool)
        or not isinstance(sequence_parallel_size, int)
        or sequence_parallel_size < 1
    ):
        raise ConfigurationError(
            "strategy.sequence_parallel_size",
            "must be a positive int",
            repr(sequence_parallel_size),
            "Use 1 to switch it off.",
        )
    if world_size % sequence_parallel_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise ConfigurationError(
            "strategy.sequence_parallel_size",
            "must divide the number of processes (devices x num_nodes)",
            f"{sequence_parallel_size} for {world_size} processes "
            f"({world_size} / {sequence_parallel_size} leaves {world_size % sequence_parallel_size})",
            f"Use one of {divisors}, or change `trainer.devices`.",
        )


def build_layout(device_type: str, sequence_parallel_size: int) -> Layout:
    """Build meshes and groups. Collective: every rank calls it at the same point, with the same size.

    Args:
        device_type: ``"cpu"``, ``"cuda"``: of the parameters and of the exchanges.
        sequence_parallel_size: ranks that share a row; divides the world size.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    check_world(world_size, sequence_parallel_size)
    dp_size = world_size // sequence_parallel_size
    names = ("data_parallel", "sequence_parallel")
    mesh = init_device_mesh(device_type, (dp_size, sequence_parallel_size), mesh_dim_names=names)
    shard_mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard_sp",))
    dp_rank, sp_rank = divmod(rank, sequence_parallel_size)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        sp_rank=sp_rank,
        sp_size=sequence_parallel_size,
        sp_group=mesh["sequence_parallel"].get_group() if sequence_parallel_size > 1 else None,
        token_group=shard_mesh.get_group() if world_size > 1 else None,
        sp_host_group=_sequence_host_group(dp_size, sequence_parallel_size, dp_rank),
        host_group=dist.new_group(backend="gloo", timeout=HOST_TIMEOUT) if world_size > 1 else None,
        ranks_averaged=world_size,
    )
    return Layout(mesh, shard_mesh, topology)


def _sequence_host_group(dp_size: int, sp_size: int, dp_rank: int) -> dist.ProcessGroup | None:
    if sp_size == 1:
        return None
    # Every rank takes part in making every group: new_group is collective over the world.
    groups = [
        dist.new_group(list(range(start * sp_size, (start + 1) * sp_size)), backend="gloo", timeout=HOST_TIMEOUT)
        for start in range(dp_size)
    ]
    mine: dist.ProcessGroup = groups[dp_rank]
    return mine
