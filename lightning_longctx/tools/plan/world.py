"""A process group of any size in one process, whose collectives move nothing: layouts of machines that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.strategies.ulysses import Exchange, set_running_exchange

__all__ = ["World", "imagined_layout", "imagined_world"]


@contextmanager
def imagined_world(size: int) -> Iterator[None]:
    """Be rank 0 of ``size`` processes.

    Raises:
        ConfigurationError: this process belongs to a real group.
    """
    if dist.is_initialized():
        fix = "Run `longctx plan` alone."
        raise ConfigurationError("longctx plan", "must run outside of a process group", "a connected process", fix)
    import_module("torch.distributed._tools.fake_collectives")  # what collectives do on tensors without memory
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class World(NamedTuple):
    """Where the simulated rank stands.

    Attributes:
        mesh: what parameters are cut over, as the strategy makes it.
        row_group: the ranks that share a row; None for one.
    """

    mesh: DeviceMesh
    row_group: dist.ProcessGroup | None


def imagined_layout(settings: MemorySettings) -> World:
    """Lay the ranks of :func:`imagined_world` out, and let attention exchange between those that share a row."""
    size, sp_size = settings.world_size, settings.sequence_parallel_size
    copies = settings.data_parallel_replicate_size
    axes = ("data_parallel_replicate", "shard_sp")
    parameters = init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=axes)
    rows = init_device_mesh("cpu", (size // sp_size, sp_size), mesh_dim_names=("data_parallel", "sequence_parallel"))
    group = rows["sequence_parallel"].get_group() if sp_size > 1 else None
    set_running_exchange(Exchange(group))
    return World(parameters if copies > 1 else parameters["shard_sp"], group)
