"""Who holds which tokens: the ranks, sizes and groups of a run, for any strategy.

Every part of the suite asks :func:`topology_of` and none asks for a concrete strategy. A strategy that knows more
than its world size offers a ``topology`` property; for the others the answer follows from Lightning's public
attributes.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = ["HOST_TIMEOUT", "Topology", "new_host_group", "topology_of"]

#: How long ranks wait for one another's data: a first row at 1M tokens took 80 minutes behind a count gate elsewhere,
#: and a slow row must not kill the run, so the limit is far above that.
HOST_TIMEOUT = timedelta(hours=4)

# Seconds. A thread of gloo needs microseconds; with 60 threads for each core it waits 0.1 s for its turn.
_PAUSE_AT_EXIT = 0.2


@dataclass(frozen=True)
class Topology:
    """Ranks, sizes and process groups of this process. The default is one process, without groups.

    Attributes:
        rank: global rank.
        world_size: number of processes.
        dp_rank: which data-parallel replica this rank belongs to; ranks of one sequence-parallel group share it.
        dp_size: number of data-parallel replicas, each with its own documents.
        sp_rank: which shard of the row this rank holds.
        sp_size: number of shards of a row.
        sp_group: device group of the ranks that share a row; None if ``sp_size`` is 1.
        token_group: device group of the ranks that hold distinct tokens (data-parallel x sequence-parallel); None if
            alone.
        sp_host_group: CPU group of the ranks that share a row, with :data:`HOST_TIMEOUT`; None if ``sp_size`` is 1.
        host_group: CPU group of all ranks, with :data:`HOST_TIMEOUT`; None if there is one process.
        ranks_averaged: over how many ranks the strategy averages gradients.

    Example:
        >>> Topology().dp_size, Topology().sp_size, Topology().is_reader
        (1, 1, True)
    """

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    sp_group: dist.ProcessGroup | None = None
    token_group: dist.ProcessGroup | None = None
    sp_host_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None
    ranks_averaged: int = 1

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads the documents of its sequence-parallel group."""
        return self.sp_rank == 0


def topology_of(trainer: Any) -> Topology:
    """Return the topology of a trainer, whatever its strategy.

    The first call with several processes creates a CPU group, so every rank must make it at the same point: ``setup``
    of a callback or data module is such a point.

    Args:
        trainer: a Lightning ``Trainer``, or anything with a ``strategy``; None stands for one process.

    Returns:
        The strategy's own ``topology`` if it has one; the data-parallel layout of DDP and the like; otherwise one
        process.

    Raises:
        ConfigurationError: the processes are not connected yet, or the strategy replicates tokens over ranks in a way
            that it does not tell (neither ``topology`` nor a mesh axis ``data_parallel``).
    """
    if trainer is None:
        return Topology()
    strategy = trainer.strategy
    own = getattr(strategy, "topology", None)
    if isinstance(own, Topology):
        return own
    world_size = int(getattr(strategy, "world_size", 1))
    if world_size == 1:
        return Topology()
    if not dist.is_initialized():
        raise ConfigurationError(
            "trainer",
            "must have connected its processes before its topology is asked for",
            f"{counted(world_size, 'process')} without a process group",
            "Ask in `setup` or later.",
        )
    known = _topologies.get(strategy)
    if known is None or known[0] is not dist.group.WORLD:
        known = (dist.group.WORLD, _data_parallel_topology(strategy, world_size))
        _topologies[strategy] = known
    return known[1]


def new_host_group(ranks: list[int] | None = None, timeout: timedelta = HOST_TIMEOUT) -> dist.ProcessGroup:
    """Make a group that exchanges over the memory of the hosts (gloo). All ranks of the world call it.

    At its end, a process that has made one pauses for 0.2 s. A thread of gloo lets go of a tensor a little after the
    exchange is done, and needs the interpreter for it: if that has begun to end, the process aborts, with exit code -6
    after a whole run (https://github.com/pytorch/pytorch/pull/179291). To destroy the groups does not help, since the
    threads go on as long as anything refers to them: a mesh, a sharded parameter.

    Args:
        ranks: who is in it. Default None: all.
        timeout: how long they wait for one another.
    """
    _pause_at_exit()
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=timeout)
    return group


@cache
def _pause_at_exit() -> None:
    atexit.register(time.sleep, _PAUSE_AT_EXIT)


# Groups are made once for each strategy and world; kept beside the strategy because it is not ours to write on.
_topologies: WeakKeyDictionary[Any, tuple[dist.ProcessGroup | None, Topology]] = WeakKeyDictionary()


def _data_parallel_topology(strategy: Any, world_size: int) -> Topology:
    sampler = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    dp_size = int(sampler.get("num_replicas", world_size))
    dp_rank = int(sampler.get("rank", strategy.global_rank))
    token_group: dist.ProcessGroup | None = dist.group.WORLD
    if dp_size != world_size:
        mesh = getattr(strategy, "device_mesh", None)
        if mesh is None or "data_parallel" not in (mesh.mesh_dim_names or ()):
            raise ConfigurationError(
                "trainer.strategy",
                "must tell which ranks hold distinct tokens",
                f"{type(strategy).__name__} with {counted(dp_size, 'data-parallel replica')} on"
                f" {counted(world_size, 'process')}",
                "Use LongContextFSDPStrategy or DDP.",
            )
        token_group = mesh["data_parallel"].get_group() if dp_size > 1 else None
    return Topology(
        rank=int(strategy.global_rank),
        world_size=world_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        token_group=token_group,
        host_group=new_host_group(),
        ranks_averaged=dp_size,
    )
