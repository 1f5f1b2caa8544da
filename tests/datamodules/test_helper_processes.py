"""Processes that read for a run: what they make of signals to all of it, and of what their parent has left."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_longctx.datamodules.forking import garbage_left_alone
from tests.datamodules.helpers import data_module
from tests.helpers.processes import outputs_of, start

_TOLD_TO_STOP = """
import os, signal, subprocess, sys
from tests.datamodules.helpers import data_module, keys_of, records
number, told = getattr(signal, sys.argv[1]), []
data = data_module({"a": records(400)}, num_workers=2, runtime=sys.argv[2])
rows = iter(data.train_dataloader())
seen = keys_of(next(rows))
signal.signal(number, lambda *_: told.append(number))  # processes that run already know nothing of it
subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgid(0)}"])  # as a stranger: one that the parent sends is obeyed
seen += [key for row in rows for key in keys_of(row)]
assert told == [number] and len(seen) == len(set(seen)) == 400, (told, len(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who sent a signal")
@pytest.mark.parametrize("runtime", ["main", "worker"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_helpers_go_on_when_the_whole_group_is_told_to_stop(name: str, runtime: str) -> None:
    """As Ctrl-C, torchrun and SLURM tell it: the run answers after its step, and needs rows until then."""
    process = start([sys.executable, "-c", _TOLD_TO_STOP, name, runtime])
    outputs_of([process], 120)


class _Garbage:
    """Tells where it is collected, as the process groups of an earlier fit do with a crash."""

    def __init__(self) -> None:
        self.itself = self
        self.made_in = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            Path("collected-in-a-child").touch()


def _collecting(text: str) -> list[int]:
    gc.collect()
    return [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
@pytest.mark.parametrize(("runtime", "workers"), [("main", 1), ("worker", 0), ("worker", 1)])
def test_what_the_parent_has_left_to_collect_is_not_collected_in_its_children(runtime: Any, workers: int) -> None:
    """Two fits in one process, on several ranks: the groups of the first ended the second's workers."""
    gc.collect()
    gc.disable()
    try:
        _Garbage()
        data = data_module(
            {"a": [{"text": "a"}] * 3}, tokenizer=_collecting, num_workers=workers, runtime=runtime, size=2
        )
        assert sum(len(row["document_keys"]) for row in data.train_dataloader()) == 3
    finally:
        gc.enable()
    assert not Path("collected-in-a-child").exists()
    assert gc.get_freeze_count() == 0, "the parent collects it"


@pytest.mark.parametrize(("frozen", "is_undone"), [(0, True), (375, True), (400_000, False)])
def test_only_somebodys_own_freeze_stays(frozen: int, is_undone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 frozen objects: after the first fork nothing was collected any more."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with garbage_left_alone():
        pass
    assert calls == ["freeze", *(["unfreeze"] if is_undone else [])]
