"""What other parts of a run can tell at a logged step: the data module by capability, the device's memory.

Everything here may hold a collective, so every rank calls it at the same steps, with the same parts in its trainer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from lightning_longctx.checkpoint.address import is_address
from lightning_longctx.topology import Topology
from lightning_longctx.units import GIB

__all__ = ["data_metrics", "log_evaluated", "logger_step", "own_folder", "percentile", "slowest_rank_metrics"]


def data_metrics(datamodule: Any) -> dict[str, float]:
    """Counters and mix of a data module, over all ranks.

    Args:
        datamodule: asked for ``global_counters() -> dict[str, int]`` and ``global_mix() -> dict[str, float]``, the
            share of each source in the tokens packed so far; either may be missing.
    """
    metrics: dict[str, float] = {}
    if (count := getattr(datamodule, "global_counters", None)) is not None:
        metrics |= {f"data/{name}": float(value) for name, value in count().items()}
    if (mix := getattr(datamodule, "global_mix", None)) is not None:
        metrics |= {f"data/mix/{name}": float(share) for name, share in mix().items()}
    return metrics


def slowest_rank_metrics(trainer: Any, topology: Topology) -> dict[str, float]:
    """Waits for data since the last call and peak device memory, of the rank where they are largest.

    One reduction of three numbers on the CPU group, where either is known at all.

    Args:
        trainer: its data module is asked for ``wait_seconds() -> list[float]``, how long each micro-batch since the
            last call was waited for on this rank.
        topology: the run's.
    """
    waits_of = getattr(getattr(trainer, "datamodule", None), "wait_seconds", None)
    device = trainer.strategy.root_device
    memory_of = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if waits_of is None and memory_of is None:
        return {}
    waits = [] if waits_of is None else waits_of()
    memory = 0.0 if memory_of is None else memory_of(device) / GIB
    own = [percentile(waits, 0.50), percentile(waits, 0.99), memory]
    values = torch.tensor(own, dtype=torch.float64, device="cpu")
    if topology.host_group is not None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=topology.host_group)
    middle, high, memory = values.tolist()
    metrics = {} if waits_of is None else {"data/wait_s_p50": middle, "data/wait_s_p99": high}
    return metrics if memory_of is None else {**metrics, "train/memory_peak_gib": memory}


def percentile(values: Sequence[float], part: float) -> float:
    """Smallest value that at least ``part`` of the values do not exceed; 0 without values.

    Example:
        >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
        (2.0, 3.0)
    """
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def log_evaluated(module: LightningModule, metrics: Mapping[str, float], in_progress_bar: Collection[str] = ()) -> None:
    """Log values of a whole validation or test loop that are equal on all ranks already.

    Args:
        module: of the trainer; its ``log`` makes them known to callbacks that monitor them, on every rank.
        metrics: by key; with a key for each loader where there are several.
        in_progress_bar: keys that the progress bar shows.
    """
    for name, value in metrics.items():
        # On the host and in float64, as they are. `sync_dist` keeps Lightning from warning of an epoch value that it
        # does not reduce, and `rank_zero_only` from reducing it, which would be a collective for each key.
        module.log(
            name,
            torch.tensor(value, dtype=torch.float64, device="cpu"),
            prog_bar=name in in_progress_bar,
            on_epoch=True,
            sync_dist=True,
            rank_zero_only=True,
            add_dataloader_idx=False,
        )


def logger_step(trainer: Any) -> int:
    """The step under which Lightning writes what a training batch logs; ``on_train_end`` is one further."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def own_folder(folder: str | Path) -> Path:
    """Where a callback's reports and pictures go, given the run's folder: an address is no place for them.

    Args:
        folder: the logger's, or that of the run.

    Returns:
        That folder; the working folder instead of an address such as ``s3://...``.
    """
    return Path() if is_address(folder) else Path(folder)
