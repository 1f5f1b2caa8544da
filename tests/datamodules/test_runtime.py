"""Rows made in the background: equal rows and states in both runtimes, no work of the next row in a state, no hang."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.datamodules import AdaptiveBufferPolicy, FixedBufferPolicy, PackingSettings
from lightning_longctx.datamodules.loader import RowPlan
from lightning_longctx.datamodules.row_process import RowProcess
from lightning_longctx.datamodules.rows import RowBuilder, RowState
from lightning_longctx.datamodules.runtime import ROWS_AHEAD, BackgroundRows, LocalRows
from lightning_longctx.errors import ConfigurationError, DataError
from lightning_longctx.topology import Topology
from tests.datamodules.helpers import Recorder, Stream, data_module, records, trainer

RUNTIMES = ["main", "worker"]


def _sources(kind: str) -> dict[str, Any]:
    return {"a": (list if kind == "indexable" else Stream)(records(60, 3, 40)), "b": records(12, seed=1)}


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _listed(entry) for key, entry in value.items()}
    return [_listed(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _builder_rows(data: Any, state: RowState) -> Iterator[tuple[Any, RowState]]:
    """The reference: one builder, nothing ahead."""
    builder = RowBuilder(data._training_settings(), AdaptiveBufferPolicy(), state)
    while (row := builder.next_row()) is not None:
        yield row, builder.state()


def _runtime_rows(data: Any, state: RowState, runtime: str) -> Iterator[tuple[Any, RowState]]:
    plan = RowPlan(data._training_settings(), AdaptiveBufferPolicy(), Topology(), "stop", runtime)  # type: ignore[arg-type]
    rows = plan.rows(state)
    try:
        for row in rows:
            yield row, rows.state()
    finally:
        rows.close()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["indexable", "stream"])
@pytest.mark.parametrize("balance", [False, True])
def test_rows_and_states_are_those_of_a_builder_that_does_nothing_ahead(
    runtime: str, workers: int, kind: str, balance: bool
) -> None:
    def data() -> Any:
        packing = PackingSettings(cut_to_fill=True, pad_to_multiple_of=4)
        return data_module(_sources(kind), num_workers=workers, balance=balance, packing=packing)

    wanted = list(_builder_rows(data(), RowState()))
    found = list(_runtime_rows(data(), RowState(), runtime))
    _compare(found, wanted, [kind == "stream", False])
    middle = len(wanted) // 2
    saved = RowState.from_plain(found[middle][1].to_plain([kind == "stream", False]))
    resumed = list(_runtime_rows(data(), saved, runtime))
    _compare(resumed, wanted[middle + 1 :], [kind == "stream", False])


def _compare(found: list[tuple[Any, RowState]], wanted: list[tuple[Any, RowState]], by_value: list[bool]) -> None:
    assert len(found) == len(wanted) > 3
    for (row, state), (other, other_state) in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            mine, theirs = torch.as_tensor(value), torch.as_tensor(other[key])
            assert torch.equal(mine, theirs), key
            assert mine.dtype == theirs.dtype, key
        plain, other_plain = state.to_plain(by_value), other_state.to_plain(by_value)
        assert _listed({**plain, "stream": None}) == _listed({**other_plain, "stream": None})


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rows_are_made_while_the_step_computes_and_no_more_than_agreed(runtime: str, tmp_path: Path) -> None:
    log = tmp_path / "read"
    log.touch()

    def tokenize(text: str) -> list[int]:
        with log.open("a") as file:
            file.write(".")
        return [1] * 32

    data = data_module({"a": [{"text": "x"}] * 50}, size=1, tokenizer=tokenize, runtime=runtime)
    rows = iter(data.train_dataloader())
    next(rows)
    _wait_until(lambda: log.stat().st_size == 2 + ROWS_AHEAD, "packed ahead, and one planned")
    time.sleep(0.2)
    assert log.stat().st_size == 2 + ROWS_AHEAD
    assert data.counters["documents_read"] == 1, "the state knows nothing of what was done ahead"
    rows.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_start_in_the_thread_that_iterates(workers: int) -> None:
    """A signal handler that notices a dead process can only be set in the main thread."""
    threads = []

    class Watched(LocalRows):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened = self.open

            def watched_open() -> None:
                before = len(active_children())
                opened()
                threads.append((threading.current_thread(), len(active_children()) - before))

            self.open = watched_open

    settings = data_module(num_workers=workers)._training_settings()
    rows = BackgroundRows(Watched(settings, FixedBufferPolicy(4), RowState()), RowState())
    rows.plan()
    rows.close()
    assert threads == [(threading.main_thread(), workers)]


def test_closed_rows_say_so() -> None:
    rows = BackgroundRows(LocalRows(data_module()._training_settings(), FixedBufferPolicy(4), RowState()), RowState())
    rows.plan()
    rows.give()
    rows.close()
    rows.close()
    with pytest.raises(InterruptedError, match="closed"):
        rows.plan()


def _wait_until(condition: Any, what: str, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_comes_with_its_place_and_comes_again(runtime: str, workers: int) -> None:
    items: list[Any] = [*records(6), {"text": 3}, *records(6)]
    data = data_module({"a": items}, size=1, shuffle=False, num_workers=workers, runtime=runtime)
    rows = data.train_dataloader()
    with pytest.raises(DataError, match=r"`data\.sources\.a` must have a text.*record 6 of source 'a'"):
        list(rows)
    with pytest.raises(DataError, match="record 6"):
        list(rows)


def _fails(text: str) -> list[int]:
    return [1 // 0]


@pytest.mark.parametrize(("runtime", "kind"), [("main", ZeroDivisionError), ("worker", DataError)])
def test_a_tokenizer_that_fails_is_told(runtime: str, kind: type[Exception]) -> None:
    data = data_module({"a": [{"text": "x"}] * 3}, tokenizer=_fails, runtime=runtime)
    with pytest.raises(kind, match="division or modulo by zero") as caught:
        next(iter(data.train_dataloader()))
    place = "Raised for record "
    if runtime == "worker":
        assert "in _fails" in str(caught.value), "the traceback says where"
        assert place in str(caught.value).partition("In the row process")[0]
    else:
        assert caught.value.__notes__[0].startswith(place)


class _Failing:
    """Its third record cannot be read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from [{"input_ids": [1]}] * 2
        raise OSError("no such disk")


def test_an_iterable_that_fails_names_the_record() -> None:
    with pytest.raises(OSError, match="no such disk") as caught:
        list(data_module({"a": _Failing()}, size=1).train_dataloader())
    assert caught.value.__notes__ == ["Raised for record 2 of source 'a'."]


def test_a_tokenizer_that_fails_in_a_reading_process_names_the_record() -> None:
    data = data_module({"a": [{"text": "x"}] * 3}, tokenizer=_fails, num_workers=1, shuffle=False)
    with pytest.raises(ZeroDivisionError, match="Raised for record 0 of source 'a'"):
        next(iter(data.train_dataloader()))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_error_that_is_kept_keeps_no_process(runtime: str) -> None:
    before = active_children()
    data = data_module({"a": [{"text": "x"}] * 30}, tokenizer=_fails, runtime=runtime, num_workers=2)
    with pytest.raises((ZeroDivisionError, DataError), match="division") as caught:
        next(iter(data.train_dataloader()))
    assert active_children() == before
    start = time.monotonic()
    del caught, data
    gc.collect()
    assert time.monotonic() - start < 4


def test_a_killed_row_process_is_an_error_and_not_a_hang() -> None:
    data = data_module({"a": records(400)}, runtime="worker", num_workers=1)
    loader = data.train_dataloader()
    rows = iter(loader)
    next(rows)
    process = loader._rows._background._maker._process  # type: ignore[union-attr]
    os.kill(process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(DataError, match="must live as long as the run, but got exit code -9"):
        list(rows)
    assert time.monotonic() - start < 10


@pytest.mark.slow
def test_a_killed_reading_process_is_an_error_and_not_a_hang() -> None:
    def tokenize(text: str) -> list[int]:
        if text == "bad":
            os.kill(os.getpid(), signal.SIGKILL)
        return [1] * 8

    items = [{"text": "good"}] * 20 + [{"text": "bad"}] + [{"text": "good"}] * 20
    data = data_module({"a": items}, size=1, shuffle=False, tokenizer=tokenize, num_workers=1)
    with pytest.raises(RuntimeError, match="worker"):
        list(data.train_dataloader())


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_nothing_is_left_running(runtime: str) -> None:
    def running() -> tuple[int, int]:
        return len(active_children()), sum(thread.name == "longctx-rows" for thread in threading.enumerate())

    before = running()
    loader = data_module(num_workers=1, runtime=runtime).train_dataloader()
    rows = iter(loader)
    next(rows)
    assert running() != before
    del rows
    gc.collect()
    assert running() == before, "an iterator that is dropped"
    list(loader)
    assert running() == before, "the end of data"
    module = Recorder()
    module.training_step = _raises  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        trainer().fit(module, data_module(num_workers=1, runtime=runtime))
    gc.collect()
    assert running() == before, "an error in a step"


def _raises(batch: Any, batch_idx: int) -> None:
    raise ArithmeticError


def test_closing_does_not_wait_for_more_than_one_document() -> None:
    def tokenize(text: str) -> list[int]:
        time.sleep(0.2)
        return [1] * 4

    data = data_module({"a": [{"text": "x"}] * 300}, size=200, tokenizer=tokenize)
    rows = BackgroundRows(LocalRows(data._training_settings(), FixedBufferPolicy(200), RowState()), RowState())
    rows._start()
    time.sleep(0.1)
    start = time.monotonic()
    rows.close()
    assert time.monotonic() - start < 0.6


@pytest.mark.slow
def test_the_child_ends_with_its_parent() -> None:
    code = """
import os, time
from tests.datamodules.helpers import data_module, records
data = data_module({"a": records(4000)}, runtime="worker", num_workers=1)
loader = data.train_dataloader()
rows = iter(loader)
next(rows)
print(loader._rows._background._maker._process.pid, flush=True)
time.sleep(60)
"""
    root = str(Path(__file__).resolve().parents[2])
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), "the row process ends", 15)


def _is_zombie(pid: int) -> bool:
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.slow
def test_a_process_that_ends_normally_does_not_wait_for_its_rows() -> None:
    code = """
from tests.datamodules.helpers import data_module, records
for runtime in ("main", "worker"):
    rows = iter(data_module({"a": records(4000)}, runtime=runtime, num_workers=1).train_dataloader())
    next(rows)
    globals()[runtime] = rows
"""
    root = str(Path(__file__).resolve().parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)


@pytest.mark.slow
def test_the_child_can_be_spawned() -> None:
    data = data_module({"a": records(30)})
    settings = data._training_settings()
    spawned = RowProcess(settings, AdaptiveBufferPolicy(), RowState(), start_method="spawn")
    local = LocalRows(settings, AdaptiveBufferPolicy(), RowState())
    spawned.open()
    try:
        while (plan := spawned.plan()).offers:
            assert plan == local.plan()
            row, state = spawned.give(0)
            other, other_state = local.give(0)
            assert torch.equal(row["input_ids"], other["input_ids"])
            assert _listed(state.to_plain([False])) == _listed(other_state.to_plain([False]))
        assert not local.plan().offers
    finally:
        spawned.close()


def test_waits_are_noted_and_given_once() -> None:
    def tokenize(text: str) -> list[int]:
        time.sleep(0.05)
        return [1] * 32

    data = data_module({"a": [{"text": "x"}] * 6}, size=1, tokenizer=tokenize)
    assert data.wait_seconds() == []
    count = sum(1 for _ in data.train_dataloader())
    waits = data.wait_seconds()
    assert len(waits) == count == 6
    assert 0.04 < waits[0] < 1
    assert data.wait_seconds() == []


def test_context_aware_was_not_measured_in_a_worker() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.loading\.runtime.*must be main"):
        data_module(max_seq_len="512K", buffer_policy="context_aware", runtime="worker")
    with pytest.raises(ConfigurationError, match="Did you mean 'worker'"):
        data_module(runtime="workers")
