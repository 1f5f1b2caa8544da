"""A pool of CPU processes for distributed tests, shared by the whole pytest session.

Starting processes and importing torch takes seconds, a task on a running pool takes milliseconds. The pool starts with
the first task. A task that hangs is a failure: the pool reports the stack of each rank and kills its own processes, and
the next task gets a new pool.

Example:
    >>> def total(value):  # top level of a test module
    ...     dist.init_process_group("gloo")
    ...     ...
    >>> run_ranks(total, 2, 1.0)  # doctest: +SKIP
    [2.0, 2.0]
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.helpers.pool_worker import Outcome, Task

MAX_RANKS = 4
#: After one rank failed, how long the others may take to notice (seconds).
GRACE = 5.0
#: How long a worker may take to print its stack on a busy machine (seconds).
STACK = 10.0
#: How long a worker may take to import torch on a busy machine (seconds).
STARTUP = 120.0

_ROOT = Path(__file__).resolve().parents[2]


class RankError(RuntimeError):
    """A task failed. The text holds each failed rank's traceback, the first failure first.

    Attributes:
        causes: the exception by rank, where it can be pickled; a rank that hangs or dies has none.
    """

    def __init__(self, title: str, reports: dict[int, str], causes: dict[int, BaseException]) -> None:
        super().__init__("\n".join([title, *(f"--- rank {rank}: {text}" for rank, text in reports.items())]))
        self.reports = reports
        self.causes = causes


@dataclass
class _Worker:
    rank: int
    folder: Path
    connection: Connection = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)
    log_start: int = 0

    def __post_init__(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "tests.helpers.pool_worker", str(theirs.fileno()), str(self.rank)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.stacks)],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its own group, so that its data-loader children can be ended with it
            )
        theirs.close()
        self.connection = ours

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"

    def expect(self, message: bytes, limit: float) -> bool:
        """Whether ``message`` arrives in time."""
        try:
            return self.connection.poll(limit) and self.connection.recv_bytes() == message
        except (EOFError, ConnectionError):
            return False

    def output(self) -> str:
        """The last lines that the task printed."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in lines[-120:])  # a process that died leaves its stack

    def stack(self) -> str:
        """Where the process is, by its own signal handler."""
        self.process.send_signal(signal.SIGUSR1)
        deadline, text = time.monotonic() + STACK, ""
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, text = text, self.stacks.read_text()
            if text and text == before:
                break
        return text

    def kill(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Pool:
    """Up to four long-lived workers; worker ``i`` is always rank ``i``."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self.workers: list[_Worker] = []
        self.tasks = 0
        self.usable = False

    def run(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Run a task on ranks ``0 .. world_size - 1`` and return the results by rank."""
        self.usable = False
        self._grow(world_size)
        workers = self.workers[:world_size]
        for worker, task in zip(workers, self._tasks(function, world_size, args), strict=True):
            worker.log_start = worker.log.stat().st_size
            worker.connection.send_bytes(pickle.dumps(task))
        run = _Run(workers, timeout)
        run.wait()
        self.usable = not run.lost and all(worker.expect(b"restored", GRACE * 2) for worker in workers)
        if run.reports:
            title = f"{function.__module__}.{function.__qualname__} failed on {len(run.reports)} of {world_size} ranks"
            raise RankError(title, run.reports, run.causes)
        if not self.usable:
            raise RankError("a worker did not come back to a clean state", {w.rank: w.output() for w in workers}, {})
        return [pickle.loads(run.results[rank]) for rank in range(world_size)]

    def close(self) -> None:
        """End the workers of this pool."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _grow(self, world_size: int) -> None:
        new = [_Worker(rank, self.folder) for rank in range(len(self.workers), world_size)]
        self.workers += new
        for worker in new:
            if not worker.expect(b"started", STARTUP):
                raise RankError("a worker did not start", {worker.rank: worker.output()}, {})

    def _tasks(self, function: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> list[Task]:
        self.tasks += 1
        folder = self.folder / f"task{self.tasks}"
        folder.mkdir()
        shared = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{self.tasks}",
        }
        task = Task(
            function.__module__,
            function.__qualname__,
            pickle.dumps(args),
            shared,
            str(folder),
            [os.path.abspath(entry) for entry in sys.path],
            _warning_filters,
        )
        return [task] * world_size


class _Run:
    """One task under way: collects outcomes until all ranks are done or the time is up."""

    def __init__(self, workers: list[_Worker], timeout: float) -> None:
        self.pending = {worker.connection: worker for worker in workers}
        self.workers = workers
        self.timeout = timeout
        self.results: dict[int, bytes] = {}
        self.reports: dict[int, str] = {}
        self.causes: dict[int, BaseException] = {}
        self.lost = False  # a rank hangs or died

    def wait(self) -> None:
        deadline = time.monotonic() + self.timeout
        while self.pending:
            ready = wait(list(self.pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up()
                return
            for connection in ready:
                self._collect(self.pending.pop(connection))  # type: ignore[call-overload]
            if self.reports:
                deadline = min(deadline, time.monotonic() + GRACE)
        self._release([worker for worker in self.workers if worker.rank in self.results])

    def _collect(self, worker: _Worker) -> None:
        try:
            outcome: Outcome = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.lost = True
            code = worker.process.wait()
            self.reports[worker.rank] = f"died with exit code {code}{worker.output()}"
            return
        if not outcome.error:
            self.results[worker.rank] = outcome.result
            return
        self.reports[worker.rank] = outcome.error + worker.output()
        if outcome.cause:
            self.causes[worker.rank] = pickle.loads(outcome.cause)
        self._release([worker])  # it leaves its groups, so that the others fail at once

    def _give_up(self) -> None:
        self.lost = True
        reason = "waited for a rank that failed" if self.reports else f"did not finish within {self.timeout:g} s"
        for worker in self.pending.values():
            self.reports[worker.rank] = f"{reason}; its stack:\n{worker.stack()}{worker.output()}"

    @staticmethod
    def _release(workers: list[_Worker]) -> None:
        for worker in workers:
            worker.connection.send_bytes(b"release")


_pool: Pool | None = None
_warning_filters: list[tuple[Any, ...]] = []


def set_warning_filters(filters: list[tuple[Any, ...]]) -> None:
    """Set the arguments of ``warnings.filterwarnings`` for each task, in order; the later one wins."""
    _warning_filters[:] = filters


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes and return what each returned, by rank.

    Args:
        function: a function at the top level of a module. Its process has the variables of ``torchrun``, so that
            Lightning or ``init_process_group("gloo")`` finds its peers, one thread, fixed seeds, and an empty folder
            (shared by the ranks of the task) as its working folder.
        world_size: 1 to 4.
        args: picklable, the same for each rank.
        timeout: seconds until a task counts as hanging.

    Raises:
        RankError: a rank raised, died or did not finish.
    """
    __tracebackhide__ = True
    global _pool
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"`world_size` must be 1 to {MAX_RANKS}, but got {world_size}.")
    if "<" in function.__qualname__:
        raise ValueError(f"`function` must be at the top level of a module, but got {function.__qualname__}.")
    if _pool is None:
        _pool = Pool()
    try:
        return _pool.run(function, world_size, args, timeout)
    finally:
        if not _pool.usable:  # also after an interrupt or a time limit: the ranks are in an unknown state
            close_pool()


def close_pool() -> None:
    """End the pool of this session, if there is one."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


atexit.register(close_pool)
