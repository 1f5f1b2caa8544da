"""What ``ChannelLoss`` costs: the sums of one long row against a loop over documents, and its share of a training step.

The loop is what other implementations do: for each document of a row, select its tokens, add up their losses, count
them, and read both on the host. Both ways run in one process and take turns; the ratio is the median of the ratios
inside a turn.

The share of a step is measured in the run of ``examples/quickstart.yaml`` (two processes that share each row): the time
inside of the callback at a logged and at an unlogged step, over the time of the step. The same run compares the sum of
the weighted losses with ``train/loss`` at each logged step, on real text.

    python benchmarks/channel_loss.py [--json PATH] [--repeats N] [--steps N] [--parts sums step]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from benchmarks.figures import Figure
from lightning_longctx.callbacks import ChannelLoss, TrainingMetrics
from lightning_longctx.callbacks.channel_batch import BatchReader, losses_of_output
from lightning_longctx.callbacks.channel_sums import ChannelSums
from lightning_longctx.callbacks.channel_values import channel_values
from lightning_longctx.callbacks.source_names import SourceTable
from lightning_longctx.cli.parts import build_from_config

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("code", "prose", "web", "books", "math", "chat", "mail")

#: Bars: seconds of the sums, share of a logged step, share of an unlogged step, relative error of the sum.
MAX_SUM_SECONDS, MAX_LOGGED, MAX_UNLOGGED, MAX_ERROR = 5e-3, 0.01, 1e-4, 1e-6


def make_row(tokens: int = 2**20, documents: int = 4096) -> dict[str, Tensor]:
    """A row of random documents from seven sources; one label in ten has no target."""
    generator = torch.Generator().manual_seed(0)
    borders = torch.randperm(tokens - 1, generator=generator)[: documents - 1].sort().values + 1
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), borders, torch.tensor([tokens])])
    source = torch.randint(0, len(SOURCES), (documents,), generator=generator)
    labels = torch.randint(0, 1000, (1, tokens), generator=generator)
    labels[torch.rand(1, tokens, generator=generator) < 0.1] = -100
    labels[0, bounds[1:] - 1] = -100
    return {
        "shift_labels": labels,
        "source_ids": source.repeat_interleave(bounds.diff())[None],
        "cu_seqlens": bounds.int(),
        "document_keys": torch.stack([source, torch.arange(documents)], 1),
        "per_token_loss": torch.rand(1, tokens, generator=generator),
    }


def by_document(row: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Loss and number of targets by source: a loop over documents."""
    losses, labels = row["per_token_loss"][0], row["shift_labels"][0]
    sums: dict[str, tuple[float, int]] = {}
    bounds = row["cu_seqlens"].tolist()
    for source, start, end in zip(row["document_keys"][:, 0].tolist(), bounds, bounds[1:], strict=False):
        valid = labels[start:end] != -100
        total, count = sums.get(SOURCES[source], (0.0, 0))
        sums[SOURCES[source]] = (total + losses[start:end][valid].double().sum().item(), count + int(valid.sum()))
    return sums


def by_slot(row: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
    """The same by what ``ChannelLoss`` does to a micro-batch, read on the host at the end."""
    reader, sums = BatchReader(SourceTable(SOURCES)), ChannelSums(len(SOURCES), torch.device("cpu"))
    found = losses_of_output(row["per_token_loss"], row)
    sums.add(found.losses, found.is_target, reader.slots_of_targets(row, found.losses))
    values = channel_values(sums.totals(), reader.table)
    return {name: (value.loss * value.targets, value.targets) for name, value in values.items()}


def measure_sums(repeats: int) -> dict[str, float]:
    """Seconds of both ways and their ratio; the values must agree."""
    row = make_row()
    mine, loop = by_slot(row), by_document(row)
    assert mine.keys() == loop.keys()
    for name, (total, count) in loop.items():
        assert mine[name][1] == count
        assert abs(mine[name][0] - total) <= 1e-9 * total

    def seconds(way: Callable[[dict[str, Tensor]], Any]) -> float:
        start = time.perf_counter()
        way(row)
        return time.perf_counter() - start

    turns = [(seconds(by_slot), seconds(by_document)) for _ in range(repeats)]
    return {
        "seconds": statistics.median(turn[0] for turn in turns),
        "fastest": min(turn[0] for turn in turns),
        "loop_seconds": statistics.median(turn[1] for turn in turns),
        "ratio": statistics.median(loop / mine for mine, loop in turns),
    }


class Timed(ChannelLoss):
    """Notes the seconds inside of its hooks, for each step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        """As ever, timed."""
        start = time.perf_counter()
        super().on_train_batch_start(*arguments)
        self.seconds.append(time.perf_counter() - start)

    def on_train_batch_end(self, *arguments: Any) -> None:
        """As ever, timed."""
        start = time.perf_counter()
        super().on_train_batch_end(*arguments)
        self.seconds[-1] += time.perf_counter() - start


class Watch(Callback):
    """Notes the seconds of each step, and compares the sum of the weighted losses with the logged loss."""

    def __init__(self, channel: ChannelLoss) -> None:
        self.channel, self.marks, self.errors = channel, [time.perf_counter()], []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """After the other callbacks."""
        self.marks.append(time.perf_counter())
        loss = float(trainer.callback_metrics["train/loss"])
        total = sum(value.weighted_loss for value in self.channel.latest.values())
        self.errors.append(abs(total - loss) / loss)


def measure_step(steps: int) -> dict[str, Any]:
    """Train as the quickstart does, with one callback that logs each step and one that never does."""
    logged, unlogged = Timed(), Timed(prefix="never", every_n_steps=10**9)
    settings = {"trainer.max_steps": steps, "trainer.logger": False, "trainer.callbacks": []}
    config = str(ROOT / "examples" / "quickstart.yaml")
    trainer = build_from_config(config, "trainer", settings)
    others = [one for one in trainer.callbacks if not isinstance(one, (ChannelLoss, TrainingMetrics))]
    watch = Watch(logged)
    trainer.callbacks = [TrainingMetrics(), logged, unlogged, watch, *others]
    trainer.fit(build_from_config(config, "model"), build_from_config(config, "data"))
    spans = [later - earlier for earlier, later in zip(watch.marks, watch.marks[1:], strict=False)][2:]
    shares = [own / span for own, span in zip(logged.seconds[2:], spans, strict=True)]
    idle = [own / span for own, span in zip(unlogged.seconds[2:], spans, strict=True)]
    return {
        "is_first": trainer.is_global_zero,
        "step_seconds": statistics.median(spans),
        "logged_seconds": statistics.median(logged.seconds[2:]),
        "logged_share": statistics.median(shares),
        "unlogged_share": statistics.median(idle),
        "worst_error": max(watch.errors),
    }


def figures(results: dict[str, Any]) -> list[Figure]:
    """The sums against a loop over documents, and the shares of a step."""
    found = []
    if "sums" in results:
        sums = results["sums"]
        peer, bar = "loop over documents", MAX_SUM_SECONDS * 1e3
        theirs = sums["fastest"] * sums["ratio"] * 1e3
        found.append(Figure("sums of 4,096 documents in 1M tokens", sums["fastest"] * 1e3, "ms", peer, theirs, bar))
    if "step" in results:
        step = results["step"]
        found += [
            Figure("a logged step of the quickstart", 100 * step["logged_share"], "%", bar=100 * MAX_LOGGED),
            Figure("an unlogged step", 100 * step["unlogged_share"], "%", bar=100 * MAX_UNLOGGED),
            Figure("sum of sources - logged loss", step["worst_error"], "relative", bar=MAX_ERROR),
        ]
    return found


def main() -> None:
    """Run the parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--repeats", type=int, default=31, help="turns of the sums (default: 31)")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    parser.add_argument("--parts", nargs="*", default=["sums", "step"], help="what to run (default: both)")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    lines = []
    # Lightning starts this script again for the second process, which only trains.
    first = "LOCAL_RANK" not in os.environ
    if "sums" in arguments.parts and first:
        found = results["sums"] = measure_sums(arguments.repeats)
        note = f"{found['fastest'] * 1e3:.1f} ms (median {found['seconds'] * 1e3:.1f}), loop {found['ratio']:.0f} x"
        lines.append(("sums of 4,096 documents in 1M tokens", note, "5 ms", found["fastest"] < MAX_SUM_SECONDS))
    if "step" in arguments.parts:
        found = results["step"] = measure_step(arguments.steps)
        note = f"{found['logged_share']:.3%} ({found['logged_seconds'] * 1e3:.1f} ms)"
        lines.append(("a logged step of the quickstart", note, "1 %", found["logged_share"] < MAX_LOGGED))
        lines.append(
            ("an unlogged step", f"{found['unlogged_share']:.4%}", "0.01 %", found["unlogged_share"] < MAX_UNLOGGED)
        )
        lines.append(
            ("sum of sources - logged loss", f"{found['worst_error']:.1e}", "1e-6", found["worst_error"] < MAX_ERROR)
        )
    if not first:
        return
    print(
        f"\n{date.today()}, torch {torch.__version__}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads\n"
    )
    print("| what | found | bar | |\n|---|---|---|---|")
    for name, note, bar, passed in lines:
        print(f"| {name} | {note} | {bar} | {'PASS' if passed else 'FAIL'} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
