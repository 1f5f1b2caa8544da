"""Starts the processes of one world after another, each with the variables of ``torchrun``, and ends what hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_longctx.errors import ConfigurationError

__all__ = ["run_world"]

# After one rank failed, how long the others may take to notice, in seconds.
_GRACE = 10.0
_TAIL = 15


def run_world(words: Sequence[str], world_size: int, folder: Path, timeout: float) -> None:
    """Run ``longctx`` with these words in ``world_size`` processes and wait for them.

    Args:
        words: of the command line.
        world_size: processes.
        folder: for their output.
        timeout: seconds.

    Raises:
        ConfigurationError: a process failed or did not end in time; the message has the end of its output.
    """
    port = _free_port()
    processes = [_start(words, rank, world_size, port, folder) for rank in range(world_size)]
    deadline, noticed = time.monotonic() + timeout, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if not noticed and any(process.poll() for process in processes):
            noticed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    if not any(codes) and None not in codes:
        return
    # Ranks other than 0 leave a mistake in the configuration to rank 0, so the longest output has the reason.
    tails = {rank: _tail(_log(folder, world_size, rank)) for rank, code in enumerate(codes) if code or not any(codes)}
    rank = max(tails, key=lambda rank: len(tails[rank]))
    what = f"exit code {codes[rank]}" if codes[rank] else f"no end within {timeout:g} s"
    got = f"{what}: {tails[rank]}"
    raise ConfigurationError(
        f"rank {rank} of {world_size}", "must run to its end", got, "Mend that, or raise --timeout."
    )


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-_TAIL:])


def _start(words: Sequence[str], rank: int, world_size: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "longctx-doctor",
        "OMP_NUM_THREADS": "1",  # several processes share the cores, and sums keep their order
    }
    with _log(folder, world_size, rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603  (our own command)
            [sys.executable, "-m", "lightning_longctx", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _log(folder: Path, world_size: int, rank: int) -> Path:
    return folder / f"world{world_size}_rank{rank}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
