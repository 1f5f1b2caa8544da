"""What a save costs training: the pause, the step time while it is written, waits between slots, host memory.

The pause is compared with copying the same tensors into warm memory, which no way of saving behind training can beat.
All ways run in one process and take turns on the same state; ratios are medians of the ratios inside a turn, so they
hold on a busy machine where seconds do not. The first turn, which allocates, is shown apart.

    python benchmarks/checkpoint.py [--json PATH] [--megabytes N] [--turns N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.figures import Figure
from lightning_longctx.checkpoint.writer import CheckpointWriter, SaveRequest, WriterSettings

State = dict[str, Tensor]
#: The bars: pause over memcpy, mean step during a write over idle, memory over the state, growth over 20 saves.
BARS = {"pause": 1.35, "step": 1.2, "memory": 1.1, "growth": 0.05}
MB = 10**6


def large_state(megabytes: int) -> State:
    """Fifty equal float32 tensors."""
    size = megabytes * MB // 4 // 50
    return {f"layer.{number}.weight": torch.randn(size) for number in range(50)}


def small_state(count: int = 5000) -> State:
    """Many tensors of 256 bytes."""
    return {f"norm.{number}.weight": torch.randn(64) for number in range(count)}


class Memcpy:
    """The floor: a copy into memory that was touched before."""

    name = "memcpy"

    def __init__(self, state: State, folder: Path) -> None:
        self.buffers = {key: torch.zeros_like(value) for key, value in state.items()}

    def save(self, state: State) -> None:
        """Save; returns when training may go on."""
        for key, value in state.items():
            self.buffers[key].copy_(value)

    def wait(self) -> None:
        """Nothing is under way."""


class Ours:
    """``AsyncDCPCheckpoint``'s writer, one slot."""

    name = "AsyncDCPCheckpoint"

    def __init__(self, state: State, folder: Path) -> None:
        self.writer = CheckpointWriter(folder, WriterSettings(timeout=timedelta(minutes=5)))
        self.writer.open()
        self.writer.slots["weights"].buffers.prepare(state)
        self.step = 0

    def save(self, state: State) -> None:
        """Save; returns when training may go on."""
        self.step += 1
        self.writer.save(SaveRequest(self.step, {"weights": state}, {}))

    def wait(self) -> None:
        """Return once it is written."""
        self.writer.drain()
        self.writer.raise_failure()


class TorchAsync:
    """``torch.distributed.checkpoint.async_save``, its defaults."""

    name = "torch async_save"

    def __init__(self, state: State, folder: Path) -> None:
        self.folder, self.number, self.future = folder, 0, None

    def save(self, state: State) -> None:
        """Save; returns when training may go on."""
        self.number += 1
        self.future = async_save(state, checkpoint_id=self.folder / str(self.number))

    def wait(self) -> None:
        """Return once it is written."""
        assert self.future is not None
        self.future.result()
        shutil.rmtree(self.folder / str(self.number - 1), ignore_errors=True)


class TorchSave(TorchAsync):
    """``torch.distributed.checkpoint.save``."""

    name = "torch dcp.save"

    def save(self, state: State) -> None:
        """Save; returns when training may go on."""
        self.number += 1
        dcp.save(state, checkpoint_id=self.folder / str(self.number))

    def wait(self) -> None:
        """Return once it is written."""
        shutil.rmtree(self.folder / str(self.number - 1), ignore_errors=True)


class LightningAsync:
    """Lightning's ``AsyncCheckpointIO``."""

    name = "Lightning AsyncCheckpointIO"

    def __init__(self, state: State, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, state: State) -> None:
        """Save; returns when training may go on."""
        self.number += 1
        self.io.save_checkpoint({"state_dict": state}, self.folder / f"{self.number}.ckpt")

    def wait(self) -> None:
        """Return once it is written."""
        while not (self.folder / f"{self.number}.ckpt").exists():
            time.sleep(0.01)
        (self.folder / f"{self.number - 1}.ckpt").unlink(missing_ok=True)


WAYS = (Memcpy, Ours, TorchAsync, LightningAsync, TorchSave)


@dataclass(frozen=True)
class Pause:
    """Seconds that the caller is blocked, by turn, and until everything is written."""

    blocked: list[float]
    total: list[float]


def pauses(megabytes: int, turns: int, folder: Path) -> dict[str, Pause]:
    """Let all ways take turns."""
    state = large_state(megabytes)
    ways = []
    for way in WAYS:
        (folder / way.__name__).mkdir()
        ways.append(way(state, folder / way.__name__))
    times: dict[str, Pause] = {way.name: Pause([], []) for way in WAYS}
    for _ in range(turns + 1):
        for way in ways:
            begin = time.perf_counter()
            way.save(state)
            blocked = time.perf_counter() - begin
            way.wait()
            times[way.name].blocked.append(blocked)
            times[way.name].total.append(time.perf_counter() - begin)
    return times


def pause_ratio(times: dict[str, Pause], name: str) -> float:
    """Median over turns of this way's pause and the floor's, without the first turn."""
    pairs = zip(times[name].blocked[1:], times["memcpy"].blocked[1:], strict=True)
    return statistics.median(one / floor for one, floor in pairs)


def step_ratio(way: Callable[[State, Path], Any], state: State, folder: Path, turns: int, saves: int) -> float:
    """Median over turns of the mean step time during writes and between them."""
    folder.mkdir()
    saver = way(state, folder)
    saver.save(state)
    saver.wait()
    ratios = []
    for _ in range(turns):
        idle, busy = [], []
        for _ in range(saves):  # a short write leaves time for few steps
            idle += [_step() for _ in range(50)]
            saver.save(state)
            while _is_writing(saver):
                busy.append(_step())
            saver.wait()
        ratios.append(statistics.mean(busy) / statistics.mean(idle))
    return statistics.median(ratios)


_MATRIX = torch.randn(256, 256)


def _step() -> float:
    begin = time.perf_counter()
    x = _MATRIX
    for _ in range(4):
        x = x @ _MATRIX
    return time.perf_counter() - begin


def _is_writing(saver: Any) -> bool:
    if isinstance(saver, Ours):
        return bool(saver.writer.pending)
    return saver.future is not None and not saver.future.done()


def slot_waits(megabytes: int, folder: Path) -> tuple[float, float]:
    """Seconds that a save of the weights waits: while the optimizer is being written, and at most for its own slot."""
    weights, optimizer = large_state(max(1, megabytes // 20)), large_state(megabytes)
    writer = CheckpointWriter(folder)
    writer.open()
    for step in (1, 2):  # the first allocates
        writer.save(SaveRequest(step, {"weights": weights, "optimizer": optimizer}, {}))
        own = writer.slots["weights"].wait(300)
        assert own
        still_writing = "optimizer" in writer.pending
        receipt = writer.save(SaveRequest(10 + step, {"weights": weights}, {}, resumable=False))
        writer.drain()
    return receipt.blocked, float(still_writing)


def memory(megabytes: int, saves: int, folder: Path) -> tuple[float, float]:
    """Host memory added by saving, and its growth over the later saves; both over the size of the state."""
    weights, optimizer = large_state(megabytes // 3), large_state(2 * megabytes // 3)
    size = sum(tensor.nbytes for state in (weights, optimizer) for tensor in state.values())
    before = _resident()
    writer = CheckpointWriter(folder)
    writer.open()
    readings = []
    for step in range(1, saves + 1):
        writer.save(SaveRequest(step, {"weights": weights, "optimizer": optimizer}, {}))
        readings.append(_resident())
        writer.drain()
        writer.raise_failure()
    return (max(readings[:3]) - before) / size, (max(readings[-3:]) - max(readings[:3])) / size


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


@contextmanager
def _place(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent) as name:
        yield Path(name)


def measure(megabytes: int, turns: int, parent: Path | None) -> dict[str, Any]:
    """All figures."""
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    with _place(parent) as folder:
        added, growth = memory(megabytes, 20, folder / "memory")
    with _place(parent) as folder:
        times = pauses(megabytes, turns, folder)
    with _place(parent) as folder:
        few, many = large_state(megabytes), small_state()
        steps = {
            f"{way.name}, {label}": step_ratio(way, state, folder / f"{way.__name__}{label[:2]}", turns, saves)
            for label, state, saves in (("50 tensors", few, 1), ("5,000 tensors", many, 20))
            for way in (Ours, TorchAsync)
        }
        waited, was_writing = slot_waits(megabytes, folder / "slots")
    return {
        "megabytes": megabytes,
        "turns": turns,
        "pause": {name: pause_ratio(times, name) for name in times},
        "first_pause": {name: value.blocked[0] / times["memcpy"].blocked[-1] for name, value in times.items()},
        "total": {
            name: statistics.median(value.total[1:]) / times["memcpy"].blocked[-1] for name, value in times.items()
        },
        "step": steps,
        "slot_wait_s": waited,
        "optimizer_was_writing": bool(was_writing),
        "memory": added,
        "growth": growth,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as markdown."""
    lines = ["| way | pause / memcpy | first pause / memcpy | until written / memcpy |", "|---|---|---|---|"]
    for name, ratio in figures["pause"].items():
        lines.append(f"| {name} | {ratio:.2f} | {figures['first_pause'][name]:.2f} | {figures['total'][name]:.1f} |")
    lines += ["", "| way | mean step during a write / idle |", "|---|---|"]
    lines += [f"| {name} | {ratio:.2f} |" for name, ratio in figures["step"].items()]
    lines += [
        "",
        f"Weights waited {figures['slot_wait_s']:.4f} s while the optimizer was being written"
        f" ({figures['optimizer_was_writing']}); host memory +{figures['memory']:.2f} x state,"
        f" growth over 20 saves {figures['growth']:.3f} x.",
    ]
    return "\n".join(lines)


def figures(results: dict[str, Any]) -> list[Figure]:
    """Pauses, step times, waits and memory."""
    mine = results["pause"][Ours.name]
    found = [
        Figure("pause of a save", mine, "x memcpy", way.name, results["pause"][way.name], BARS["pause"])
        for way in (TorchAsync, LightningAsync, TorchSave)
    ]
    for label, bar in (("50 tensors", None), ("5,000 tensors", BARS["step"])):
        ours, theirs = (results["step"][f"{way.name}, {label}"] for way in (Ours, TorchAsync))
        found.append(Figure(f"step time during a write, {label}", ours, "x idle", TorchAsync.name, theirs, bar))
    return [
        *found,
        Figure("weights wait for the optimizer's write", results["slot_wait_s"], "s", bar=0.01),
        Figure("host memory", results["memory"], "x state", bar=BARS["memory"]),
        Figure("growth over 20 saves", results["growth"], "x state", bar=BARS["growth"]),
    ]


def bars(figures: dict[str, Any]) -> dict[str, bool]:
    """Which bars hold."""
    return {
        "pause": figures["pause"][Ours.name] <= BARS["pause"],
        "step": figures["step"][f"{Ours.name}, 5,000 tensors"] <= BARS["step"],
        "slots": figures["slot_wait_s"] < 0.01 and figures["optimizer_was_writing"],
        "memory": figures["memory"] <= BARS["memory"],
        "growth": figures["growth"] <= BARS["growth"],
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.megabytes, options.turns, options.folder)
    figures["bars"] = bars(figures)
    print(table(figures))
    print("bars:", ", ".join(f"{name} {'holds' if held else 'FAILS'}" for name, held in figures["bars"].items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
