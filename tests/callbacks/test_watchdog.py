"""The clock that notices a hang, and what a report holds."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_longctx.callbacks import watchdog
from lightning_longctx.callbacks.hang_report import document_lines, part_lines, write_report
from lightning_longctx.callbacks.watchdog import Watchdog


class _Alarm:
    def __init__(self) -> None:
        self.rang = threading.Event()
        self.calls: list[tuple[float, float]] = []

    def __call__(self, waited: float, usual: float) -> None:
        self.calls.append((waited, usual))
        self.rang.set()


def test_the_limit_is_a_multiple_of_the_median_and_at_least_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    dog = Watchdog(factor=10.0, least_s=7.0, alarm=lambda waited, usual: None)
    for seconds in (3.0, 1.0, 1.0, 1.0):
        now[0] += seconds
        dog.beat()
    assert dog.limit is None  # too few to tell
    now[0] += 50.0
    dog.touch()  # a validation: no interval
    now[0] += 2.0
    dog.beat()
    assert dog.limit == 10.0  # the median of 3, 1, 1, 1, 2
    for _ in range(90):
        now[0] += 0.1
        dog.beat()
    assert dog.limit == 7.0


def test_it_rings_once_when_beats_stop() -> None:
    alarm = _Alarm()
    dog = Watchdog(factor=2.0, least_s=0.1, alarm=alarm)
    dog.start()
    for _ in range(6):
        dog.beat()
    assert alarm.rang.wait(5.0)
    time.sleep(0.2)
    dog.stop()
    ((waited, usual),) = alarm.calls
    assert waited >= 0.1
    assert usual < 0.1


def test_signs_of_life_keep_it_quiet() -> None:
    alarm = _Alarm()
    dog = Watchdog(factor=2.0, least_s=0.3, alarm=alarm)
    dog.start()
    for _ in range(6):
        dog.beat()
    for _ in range(12):
        time.sleep(0.05)
        dog.touch()
    dog.stop()
    assert not alarm.rang.is_set()


def test_it_does_not_ring_before_the_first_steps_nor_after_the_end() -> None:
    alarm = _Alarm()
    dog = Watchdog(factor=2.0, least_s=0.05, alarm=alarm)
    dog.start()
    time.sleep(0.2)  # compiling
    dog.stop()
    dog.start()  # a second fit
    for _ in range(6):
        dog.beat()
    dog.stop()
    time.sleep(0.2)
    assert not alarm.rang.is_set()
    assert threading.active_count() == 1 or all(thread.name != "watchdog" for thread in threading.enumerate())


class _Saver:
    def hang_report(self) -> str:
        return "step 40 is being written since 12 s"


def test_parts_that_can_tell_are_asked() -> None:
    assert list(part_lines([None, _Saver(), object()])) == ["_Saver: step 40 is being written since 12 s"]


def test_documents_are_named_without_opening_files() -> None:
    keys = torch.tensor([[0, 7], [1, 8], [2, 9], [-1, -1]])
    assert list(document_lines(keys, ["books", "code"])) == [
        "Documents of the last batch that this rank started: 3",
        "  books, document 7",
        "  code, document 8",
        "  source 2, document 9",
    ]
    many = torch.stack([torch.zeros(80, dtype=torch.int64), torch.arange(80)], 1)
    lines = list(document_lines(many, ["books"]))
    assert (len(lines), lines[-1]) == (52, "  ... and 30 more")
    assert list(document_lines(None, [])) == ["Documents of the last batch that this rank started: not known"]


def test_stacks_are_on_disk_before_anything_else_can_fail(tmp_path: Path) -> None:
    def lines() -> object:
        yield "one"
        raise OSError("the file system hangs as well")

    path = tmp_path / "deep" / "hang.txt"
    with pytest.raises(OSError, match="hangs as well"):
        write_report(path, "No step.", lines())
    text = path.read_text()
    assert text.startswith("No step.\n")
    assert "test_stacks_are_on_disk_before_anything_else_can_fail" in text
    assert text.endswith("one\n")
