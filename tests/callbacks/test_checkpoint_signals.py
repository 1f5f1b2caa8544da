"""Signals and errors: one save on all ranks, one end of the run, and the original error on top."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_longctx import TrainingMetrics
from lightning_longctx.callbacks.checkpoint_signals import StopSignals
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.errors import CheckpointError
from tests.callbacks.checkpoint_toy import assert_same, fit
from tests.callbacks.toy import MemoryLogger
from tests.helpers.pool import run_ranks
from tests.helpers.processes import run_python


class Send(Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: int, at_step: int, only_rank: int | None = None) -> None:
        self.number, self.at_step, self.only_rank = number, at_step, only_rank

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at_step and self.only_rank in (None, trainer.global_rank):
            os.kill(os.getpid(), self.number)


def _steps(folder: str | Path) -> list[int]:
    return [found.commit.step for found in scan(folder) if found.commit and not found.problem]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stops_after_the_step_and_resumes_exactly(number: int) -> None:
    whole = fit("whole", 10)
    before = signal.getsignal(number)
    with pytest.raises(SIGTERMException):
        fit("parts", 10, callbacks=[Send(number, at_step=6)])
    assert _steps("parts") == [7, 5]
    assert signal.getsignal(number) is before
    assert_same(fit("parts", 10, "last"), whole)


def test_the_last_step_is_logged() -> None:
    logger = MemoryLogger()
    with pytest.raises(SIGTERMException):
        fit("c", 10, callbacks=[TrainingMetrics(), Send(signal.SIGTERM, 3)], logger=logger, log_every_n_steps=1)
    assert len(logger.column("train/loss")) == 4
    assert _steps("c") == [4]


def test_ctrl_c_saves_first_and_a_second_one_does_not_wait() -> None:
    with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
        fit("c", 10, callbacks=[Send(signal.SIGINT, at_step=2)])
    assert _steps("c") == [3]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning leaves it ignored
    with pytest.raises(SystemExit):
        fit("d", 10, callbacks=[Send(signal.SIGINT, 2), Send(signal.SIGINT, 2)])
    assert _steps("d") == []
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_slurm_is_asked_once_after_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@ $(ls {tmp_path}/c | grep step)" >> {tmp_path}/asked\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    variables = {"NTASKS": "1", "JOB_ID": "77", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(SIGTERMException):
        fit("c", 10, callbacks=[Send(signal.SIGUSR1, at_step=2)])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 1
    assert asked[0].startswith("requeue 77 step-00000003-")
    assert not list(Path().glob("hpc_ckpt*")), "Lightning's own handler would have saved inside of the signal"


def test_handlers_of_others_come_back() -> None:
    class _Trainer:
        class strategy:
            launcher = None
            cluster_environment = None

    def mine(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    signals = StopSignals(_Trainer())  # type: ignore[arg-type]
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.stop
    signals.remove()
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, before)


def _signal_to_one(folder: str, rank: int) -> tuple[str, list[int]]:
    try:
        fit(folder, 50, devices=2, sp=1, callbacks=[Send(signal.SIGTERM, 3, only_rank=rank)])
    except SIGTERMException as error:
        return type(error).__name__, _steps(folder)
    return "ended", []


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all(tmp_path: Path, rank: int) -> None:
    """Lightning broadcasts from rank 0 inside of the handler: both ranks hung to the group's time limit."""
    for name, steps in run_ranks(_signal_to_one, 2, str(tmp_path / "c"), rank):
        assert name == "SIGTERMException"
        assert steps == [4]


_ONE_RAISES = """
import time
from lightning.pytorch import Callback
import lightning_longctx.checkpoint.object_store as store_module
from lightning_longctx.checkpoint.filesystem import FileSystem
class Slow(FileSystem):
    def before(self, operation, path):
        if operation == "create" and path.suffix == ".distcp":
            time.sleep(1)
class Raise(Callback):
    def on_train_batch_start(self, trainer, *rest):
        if trainer.global_step == 4 and trainer.global_rank == 1:
            raise ZeroDivisionError("the user's")
store_module.FileSystem = Slow
from tests.callbacks.checkpoint_toy import fit
fit("c", 50, devices=2, sp=1, callbacks=[Raise()], checkpoint={"every_n_train_steps": 4})
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_an_exception_on_one_rank_leaves_its_write_complete() -> None:
    """Lightning's launcher kills the others within seconds of the end of the failing one, which drains before."""
    Path("run.py").write_text(_ONE_RAISES)
    code, _, err = run_python(["run.py"])
    assert code != 0
    assert "ZeroDivisionError: the user's" in err
    assert _steps("c") == [4]


_UNREAD = """
import sys
from pathlib import Path
import lightning_longctx.checkpoint.object_store as store_module
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning.pytorch import Callback
class Full(FileSystem):
    def before(self, operation, path):
        if operation == "write" and "weights" in str(path):
            import time; time.sleep(0.5)
            raise OSError(28, "No space left on device")
class Exit(Callback):
    def on_train_batch_start(self, trainer, *rest):
        if trainer.global_step == 2:
            raise GeneratorExit  # a process that ends without anybody looking
store_module.FileSystem = Full
import lightning.pytorch.trainer.call as call
call._interrupt = lambda *rest: None
from tests.callbacks.checkpoint_toy import fit
try:
    fit("c", 5, checkpoint={"every_n_train_steps": 2}, callbacks=[Exit()])
except GeneratorExit:
    pass
"""


@pytest.mark.slow
def test_a_process_with_an_unread_failure_ends_with_an_error() -> None:
    code, _, err = run_python(["-c", _UNREAD])
    assert code == 1
    assert "A checkpoint was not written" in err
    assert "No space left on device" in err


def _failing_save(folder: str) -> str:
    import errno

    from lightning_longctx.checkpoint import object_store as module
    from lightning_longctx.checkpoint.filesystem import FileSystem

    class Fails(FileSystem):
        def before(self, operation: str, path: Path) -> None:
            if operation == "create" and path.name == "__1_0.distcp":
                raise OSError(errno.EIO, "I/O error")

    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.05)

    original, module.FileSystem = module.FileSystem, Fails  # type: ignore[misc]
    try:
        fit(folder, 50, devices=2, sp=1, callbacks=[Slow()], checkpoint={"every_n_train_steps": 2})
    except CheckpointError as error:
        return str(error)
    finally:
        module.FileSystem = original  # type: ignore[misc]
    return ""


@pytest.mark.distributed
def test_a_save_that_fails_on_one_rank_ends_all_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(_failing_save, 2, str(tmp_path / "c"))
    assert "rank 1: OSError: [Errno 5] I/O error" in first
    assert first == second
    assert _steps(tmp_path / "c") == []
