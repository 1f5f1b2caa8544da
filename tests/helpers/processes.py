"""Processes of their own, with this checkout on the path and nothing of a launcher that started the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.contracts.source import ROOT

_LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "PL_GLOBAL_SEED")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """This process's variables, without a launcher's, and with this checkout on the path."""
    known = {name: value for name, value in os.environ.items() if name not in (*_LAUNCHERS, *_ADDRESS)}
    mine = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**known, **mine, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def run_python(words: list[str], folder: Path | None = None, limit: int = 150, **more: str) -> tuple[int, str, str]:
    """Run Python with these words to its end: exit code, output, and what it wrote to the standard error."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, check=False, timeout=limit
    )
    return done.returncode, done.stdout, done.stderr


def start(command: list[str], folder: Path | None = None, **more: str) -> subprocess.Popen[str]:
    """Start a command, in a process group of its own; both outputs are one."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def outputs_of(processes: Sequence[subprocess.Popen[str]], limit: int) -> list[str]:
    """Wait for all; what each printed.

    Raises:
        AssertionError: one ended with another exit code than 0.
    """
    try:
        printed = [process.communicate(timeout=limit)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return printed
