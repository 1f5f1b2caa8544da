"""How much host memory there is: the machine's, or that of the container around the process."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.activation_offload.settings import ActivationOffload
from lightning_longctx.units import GIB, counted

__all__ = ["available_memory", "host_limit"]

#: Of what is left: the rest is for data loading, checkpoints and the page cache.
_SHARE = 0.8

# Limit and use of the container, in version 2 and 1 of control groups.
_CONTAINER_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_memory(proc: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return total and available bytes of host memory, the smaller of machine and container.

    Args:
        proc: the kernel's table.
        groups: where control groups are mounted.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    if proc.exists():
        rows = dict(line.split(":", 1) for line in proc.read_text().splitlines() if ":" in line)
        available = int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else total
    for limit_file, used_file in _CONTAINER_FILES:
        limit, used = _number(groups / limit_file), _number(groups / used_file)
        if limit is not None:
            total = min(total, limit)
            available = min(available, max(limit - (used or 0), 0))
    return total, available


def host_limit(settings: ActivationOffload, ranks_per_node: int, memory: tuple[int, int] | None = None) -> int:
    """Bytes of host memory that this rank may take.

    Args:
        settings: of the run.
        ranks_per_node: that share the memory.
        memory: total and available bytes; None to ask the system.

    Raises:
        ConfigurationError: ``host_limit_gib`` of all ranks together is more than there is.
    """
    total, available = memory or available_memory()
    if settings.host_limit_gib is None:
        return int(available * _SHARE / ranks_per_node)
    limit = int(settings.host_limit_gib * GIB)
    if limit * ranks_per_node > total:
        got = f"{settings.host_limit_gib:g} GiB x {counted(ranks_per_node, 'rank')}"
        fix = f"At most {total / ranks_per_node / GIB:.1f} GiB for each rank, less what data and weights need."
        rule = f"must fit the host's (or its container's) {total / GIB:.1f} GiB"
        raise ConfigurationError("strategy.activation_offload.host_limit_gib", rule, got, fix)
    return limit


def _number(file: Path) -> int | None:
    """The number in a file; None without the file, or for ``max``: no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
