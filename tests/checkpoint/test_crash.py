"""Whatever dies, whenever: the last complete checkpoint is there, is found, and holds its own step only."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_longctx.checkpoint.address import Folder, as_folder
from lightning_longctx.checkpoint.discovery import find_latest
from lightning_longctx.checkpoint.filesystem import FileSystem
from tests.checkpoint.helpers import KillingFileSystem, check_pure, leftovers, save, steps, writer
from tests.checkpoint.objects import Killer, watched
from tests.helpers.pool import free_port

SAVES = 4


def _save_all(root: Folder, log: Path, kill_at: int | None) -> int:
    """Save, and note each commit that was reported; ``kill_at`` counts the operations of the slots' threads too."""
    if isinstance(root, Path):
        counter: Any = KillingFileSystem(kill_at)
        return _save_through(counter, counter, root, log)
    counter = Killer(kill_at)
    with watched(counter):
        return _save_through(None, counter, root, log)


def _save_through(filesystem: FileSystem | None, counter: Any, root: Folder, log: Path) -> int:
    checkpoints = writer(root, filesystem)
    first = max(steps(root), default=0) + 1
    for step in range(first, first + SAVES):
        save(checkpoints, step, slots=("weights", "optimizer") if step % 2 else ("weights",))
        with log.open("a") as file:
            file.write(f"{step}\n")
            file.flush()
    return int(counter.count)


def _killed(root: Folder, log: Path, kill_at: int) -> int:
    """Run the saves in a child that kills itself; its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            _save_all(root, log, kill_at)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 250 processes one after another: half a minute, or many on a busy machine
@pytest.mark.parametrize(("store", "least"), [("", 150), ("objects://", 80)])
def test_killed_before_every_single_operation(tmp_path: Path, store: str, least: int) -> None:
    """Lightning#688: kill -9 leaves a broken file at the final name. composer#3376: a pointer precedes its data."""
    operations, problems = _in_fresh_process(_sweep, tmp_path, store)
    assert operations > least
    assert problems == []


def _sweep(folder: Path, store: str) -> tuple[int, list[str]]:
    """In a fresh process, where forking is safe: kill before operation 0, 1, 2, ..."""
    operations = _count(as_folder(f"{store}{folder}/whole"), folder / "whole.log")
    problems = []
    for kill_at in range(operations):
        root, log = as_folder(f"{store}{folder}/{kill_at}"), folder / f"{kill_at}.log"
        log.touch()
        code = _killed(root, log, kill_at)
        if code != -signal.SIGKILL:
            problems.append(f"operation {kill_at}: exit code {code}")
        problems += [f"operation {kill_at}: {text}" for text in _problems(root, log)]
    return operations, problems


def _count(root: Folder, log: Path) -> int:
    reader, writer_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = _save_all(root, log, None)
        os.write(writer_end, str(count).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(reader, 100))


def _problems(root: Folder, log: Path) -> list[str]:
    """What is wrong after a kill, and after the start that follows it."""
    problems = []
    reported = [int(line) for line in log.read_text().split()]
    found = check_pure(root)
    if reported and (not found or found[0] < reported[-1]):
        problems.append(f"committed {reported}, found {found}")
    if reported and find_latest(root) is None:
        problems.append("nothing to resume from")
    if found:  # a new start removes what was left, and goes on
        pid = os.fork()
        if pid == 0:
            save(writer(root), 99)
            os._exit(len(leftovers(root)))
        left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        after = check_pure(root)
        if left or after[0] != 99:
            problems.append(f"after the next start: {left} left behind, found {after}")
    return problems


# -- two ranks, killed at random ---------------------------------------------------------------------------------------


def _rank(rank: int, port: int, root: Path, log: Path, ready: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    checkpoints = writer(root)
    step = checkpoints._sequence
    os.write(ready, b"r")
    while True:
        step += 1
        save(checkpoints, step, slots=("weights", "optimizer") if step % 3 else ("weights",))
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{step}\n")


def _start(rank: int, port: int, root: Path, log: Path, ready: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _rank(rank, port, root, log, ready)
    finally:
        os._exit(1)  # the other rank is gone


def _wait(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("the rank that was left did not notice")
        time.sleep(0.01)


def _round(generator: random.Random, root: Path, log: Path, port: int) -> tuple[list[int], list[int]]:
    read, write = os.pipe()
    ranks = [_start(rank, port, root, log, write) for rank in range(2)]
    while sum(len(os.read(read, 1)) for _ in range(2)) < 2:
        pass
    os.close(read)
    os.close(write)
    time.sleep(generator.uniform(0.0, 0.6))
    for victim in generator.choice([[0], [1], [0, 1]]):
        os.kill(ranks[victim], signal.SIGKILL)
    for pid in ranks:
        _wait(pid, 30)
    return [int(line) for line in log.read_text().split()], check_pure(root)


def _kill_rounds(folder: Path, rounds: int, seed: int) -> int:
    """In a fresh process: the number of saves that were committed."""
    generator = random.Random(seed)
    root, log = folder / "checkpoints", folder / "log"
    log.touch()
    reported: list[int] = []
    for number in range(rounds):
        reported, found = _round(generator, root, log, free_port())
        if reported:
            assert found, f"round {number}: {reported[-1]} was committed and nothing is found"
            assert found[0] >= reported[-1], f"round {number}: {reported[-1]} was committed, {found[0]} is found"
    return len(reported)


def _in_fresh_process(function: Any, *args: Any) -> Any:
    with get_context("spawn").Pool(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.apply(function, args)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_ranks_killed_at_random(tmp_path: Path) -> None:
    """30 runs, each going on where the last one died; rank 0, 1 or both are killed at any moment."""
    assert _in_fresh_process(_kill_rounds, tmp_path, 30, 1) > 30


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif("LONGCTX_SOAK" not in os.environ, reason="an hour; LONGCTX_SOAK=1 runs it")
@pytest.mark.timeout(7200)
def test_soak_of_random_kills(tmp_path: Path) -> None:
    assert _in_fresh_process(_kill_rounds, tmp_path, 300, 2) > 300


def test_a_complete_checkpoint_is_there_at_every_moment(tmp_path: Path) -> None:
    """Lightning#14035, Megatron-Bridge#4678 and #5184: the old one goes only after the new one is committed; keep 1."""
    root = tmp_path / "checkpoints"
    checkpoints = writer(root, keep=1)
    save(checkpoints, 1)
    seen: list[Any] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            seen.append(steps(root))
            time.sleep(0.005)

    watcher = threading.Thread(target=poll)
    watcher.start()
    for step in range(2, 12):
        save(checkpoints, step)
    stop.set()
    watcher.join()
    assert len(seen) > 5
    assert all(seen), "at some moment nothing was there"
    assert steps(root) == [11]
