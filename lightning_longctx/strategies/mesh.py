"""Which rank does what: replicas and shards of the parameters, shards of a row, with the groups that go with them.

Ranks of one sequence-parallel group are adjacent, so that they sit inside a node, where the exchanges of every layer
belong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.topology import Topology, new_host_group
from lightning_longctx.units import counted

__all__ = ["Layout", "build_layout", "check_sizes", "check_world", "describe_layout", "node_crossings"]

_AXES = ("data_parallel_replicate", "data_parallel_shard", "sequence_parallel")


@dataclass(frozen=True)
class Layout:
    """The meshes of a run and what each rank is in them.

    Attributes:
        mesh: axes ``data_parallel_replicate`` x ``data_parallel_shard`` x ``sequence_parallel``; what a module sees as
            ``self.device_mesh``.
        data_parallel: view over replicate x shard: ranks with different rows.
        shard_sp: view over shard x sequence-parallel: the ranks that a parameter is cut over. It covers the
            sequence-parallel ranks too, or their gradients would never meet.
        dp_sp: view over all three: every rank.
        shard_mesh: what FSDP2 gets: ``shard_sp`` alone, or ``data_parallel_replicate`` x ``shard_sp``.
        topology: the same facts for every other part of the suite.
    """

    mesh: DeviceMesh
    data_parallel: DeviceMesh
    shard_sp: DeviceMesh
    dp_sp: DeviceMesh
    shard_mesh: DeviceMesh
    topology: Topology


def check_sizes(sequence_parallel_size: object, replicate_size: object) -> None:
    """Check the sizes alone, while the number of processes is not known.

    Raises:
        ConfigurationError: a size that is no positive int.
    """
    sizes = {"sequence_parallel_size": sequence_parallel_size, "data_parallel_replicate_size": replicate_size}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            fix = "Use 1 to switch it off."
            raise ConfigurationError(f"strategy.{name}", "must be a positive int", repr(value), fix)


def check_world(world_size: int, sequence_parallel_size: int, replicate_size: int = 1) -> None:
    """Check that the ranks can be laid out, before any process group exists.

    Args:
        world_size: number of processes.
        sequence_parallel_size: ranks that share a row.
        replicate_size: copies of the sharded parameters.

    Raises:
        ConfigurationError: a size that is no positive int, or sizes whose product does not divide ``world_size``.
    """
    check_sizes(sequence_parallel_size, replicate_size)
    if world_size % sequence_parallel_size:
        raise ConfigurationError(
            "strategy.sequence_parallel_size",
            "must divide the number of processes (devices x num_nodes)",
            f"{sequence_parallel_size} for {counted(world_size, 'process')} "
            f"({world_size} / {sequence_parallel_size} leaves {world_size % sequence_parallel_size})",
            f"Use one of {_divisors(world_size)}, or change `trainer.devices`.",
        )
    rows = world_size // sequence_parallel_size
    if rows % replicate_size:
        raise ConfigurationError(
            "strategy.data_parallel_replicate_size",
            "must divide the number of data-parallel ranks (processes / sequence_parallel_size)",
            f"{replicate_size} for {world_size} / {sequence_parallel_size} = {counted(rows, 'rank')} "
            f"({rows} / {replicate_size} leaves {rows % replicate_size})",
            f"Use one of {_divisors(rows)}.",
        )


def build_layout(device_type: str, sequence_parallel_size: int, replicate_size: int = 1) -> Layout:
    """Build meshes and groups. Collective: every rank calls it at the same point, with the same sizes.

    Args:
        device_type: ``"cpu"``, ``"cuda"``: of the parameters and of the exchanges.
        sequence_parallel_size: ranks that share a row.
        replicate_size: copies of the sharded parameters.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    check_world(world_size, sequence_parallel_size, replicate_size)
    dp_size = world_size // sequence_parallel_size
    shards = dp_size // replicate_size
    mesh = init_device_mesh(device_type, (replicate_size, shards, sequence_parallel_size), mesh_dim_names=_AXES)
    # The views are kept: asking the mesh for a flattened axis by its name is deprecated.
    data_parallel = mesh[_AXES[0], _AXES[1]]._flatten("data_parallel")
    dp_sp = mesh._flatten("dp_sp")
    copies = (replicate_size, shards * sequence_parallel_size)
    parameters = init_device_mesh(device_type, copies, mesh_dim_names=(_AXES[0], "shard_sp"))
    dp_rank, sp_rank = divmod(rank, sequence_parallel_size)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        sp_rank=sp_rank,
        sp_size=sequence_parallel_size,
        sp_group=mesh["sequence_parallel"].get_group() if sequence_parallel_size > 1 else None,
        token_group=dp_sp.get_group() if world_size > 1 else None,
        sp_host_group=_sequence_host_group(dp_size, sequence_parallel_size, dp_rank),
        host_group=new_host_group() if world_size > 1 else None,
        ranks_averaged=world_size,
    )
    shard_sp = parameters["shard_sp"]
    return Layout(mesh, data_parallel, shard_sp, dp_sp, parameters if replicate_size > 1 else shard_sp, topology)


def node_crossings(world_size: int, sequence_parallel_size: int, ranks_per_node: int) -> list[list[int]]:
    """Return the sequence-parallel groups that do not lie inside one node, each as its ranks.

    Example:
        >>> node_crossings(12, 4, 6)
        [[4, 5, 6, 7]]
    """
    groups = [
        list(range(start, start + sequence_parallel_size)) for start in range(0, world_size, sequence_parallel_size)
    ]
    return [group for group in groups if group[0] // ranks_per_node != group[-1] // ranks_per_node]


def describe_layout(
    world_size: int, sequence_parallel_size: int, replicate_size: int = 1, ranks_per_node: int | None = None
) -> str:
    """Write the rank-to-group map as a table, one line a rank. Needs no process group.

    Args:
        world_size: number of processes.
        sequence_parallel_size: ranks that share a row.
        replicate_size: copies of the sharded parameters.
        ranks_per_node: processes of each node. Default: all on one.

    Raises:
        ConfigurationError: sizes that do not divide.
    """
    check_world(world_size, sequence_parallel_size, replicate_size)
    per_node = ranks_per_node or world_size
    shards = world_size // sequence_parallel_size // replicate_size
    lines = [
        f"{counted(world_size, 'process')} on {counted(-(-world_size // per_node), 'node')}: data_parallel_replicate"
        f" {replicate_size}"
        f" x data_parallel_shard {shards} x sequence_parallel {sequence_parallel_size}",
        f"{'rank':>5}{'node':>6}{'replicate':>11}{'shard':>7}{'sequence':>10}  shares its row with",
    ]
    for rank in range(world_size):
        row, place = divmod(rank, sequence_parallel_size)
        replica, shard = divmod(row, shards)
        first = row * sequence_parallel_size
        peers = f"{first}-{first + sequence_parallel_size - 1}" if sequence_parallel_size > 1 else "nobody"
        lines.append(f"{rank:>5}{rank // per_node:>6}{replica:>11}{shard:>7}{place:>10}  {peers}")
    for group in node_crossings(world_size, sequence_parallel_size, per_node):
        lines.append(
            f"warning: ranks {group[0]}-{group[-1]} share a row across nodes: every layer waits for the network"
        )
    return "\n".join(lines)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _sequence_host_group(dp_size: int, sp_size: int, dp_rank: int) -> dist.ProcessGroup | None:
    if sp_size == 1:
        return None
    # Every rank takes part in making every group: new_group is collective over the world.
    groups = [new_host_group(list(range(start * sp_size, (start + 1) * sp_size))) for start in range(dp_size)]
    return groups[dp_rank]
