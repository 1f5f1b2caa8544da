"""One process of the test pool: runs tasks that arrive on a pipe, always as the same rank.

It is started as ``python -m tests.helpers.pool_worker FD RANK STACK_FILE``. What a task leaves behind in the process
(process group, environment, seeds, working folder, caches that hold meshes) is put back before the next one.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Task:
    """What a worker runs. ``arguments`` stay pickled until ``sys.path`` is set, since they may name test modules."""

    module: str
    function: str
    arguments: bytes
    environment: dict[str, str]
    folder: str
    path: list[str]
    warning_filters: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Outcome:
    """What became of a task on one rank: pickled result, or the text of the error and, if it can travel, itself."""

    result: bytes = b""
    error: str = ""
    cause: bytes = b""


@dataclass
class State:
    """What is put back after each task."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    path: list[str] = field(default_factory=lambda: list(sys.path))

    def prepare(self, task: Task) -> None:
        os.environ.update(task.environment)
        os.chdir(task.folder)
        sys.path[:] = task.path
        random.seed(0)
        torch.manual_seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)

    def restore(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            _forget_meshes()
        for key in os.environ.keys() - self.environment.keys():
            del os.environ[key]
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        gc.collect()


def _forget_meshes() -> None:
    # DTensor remembers output layouts by mesh *equality*, and a remembered mesh holds the names of destroyed groups.
    # The next task may give these names to other groups: a hang, or worse a sum over the wrong ranks.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def _run(task: Task) -> Outcome:
    try:
        function: Any = importlib.import_module(task.module)
        for name in task.function.split("."):
            function = getattr(function, name)
        with warnings.catch_warnings():
            for filter_ in task.warning_filters:
                warnings.filterwarnings(*filter_)
            result = function(*pickle.loads(task.arguments))
        return Outcome(result=pickle.dumps(result))
    except BaseException as error:  # a task may exit (a command line does); the test decides what that means
        return Outcome(error="".join(traceback.format_exception(error)), cause=_pickled(error))


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except (pickle.PickleError, TypeError, AttributeError, ValueError):
        return b""
    return data


# Where stacks go; the process's own file, open for its whole life.
_stacks: IO[str] | None = None


def _show_stack_on_signal() -> None:
    """Print all stacks on SIGUSR1. Before each task: Lightning resets the handlers of all signals after a run."""
    if _stacks is not None:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)


def serve(connection: Connection) -> None:
    """Run tasks until the pool closes the pipe.

    The process group lives until the pool says that every rank is done: a rank that leaves early would break the last
    collective of the others.
    """
    state = State()
    connection.send_bytes(b"started")
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        state.prepare(task)
        _show_stack_on_signal()
        connection.send_bytes(pickle.dumps(_run(task)))
        connection.recv_bytes()
        state.restore()
        connection.send_bytes(b"restored")


def main() -> None:
    """Enter the loop; die with the parent and print stacks on SIGUSR1."""
    descriptor, rank, stack_file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan keeps a core busy
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0")
    torch.set_num_threads(1)
    global _stacks
    with open(stack_file, "w") as _stacks:
        serve(Connection(descriptor))


if __name__ == "__main__":
    # Run as a module this file is `__main__`; tasks are pickled as `tests.helpers.pool_worker.Task`.
    from tests.helpers import pool_worker

    pool_worker.main()
