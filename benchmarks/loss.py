"""Time and peak extra memory of ``causal_lm_loss`` against plain cross entropy and PyTorch's ``linear_cross_entropy``.

Each way computes the loss of every token, the step's loss and its gradients for hidden states and head weight. All ways
run in one process and take turns, so that a busy machine slows them alike; times are medians, and ratios are medians of
the ratios inside a turn. Memory is counted from the allocator's own events: what a way allocates beyond its inputs at
its worst moment, less the two gradients that every way must return.

    python benchmarks/loss.py [--json PATH] [--repeats N] [--chunks LOGITS ...] [--cases NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.figures import Figure
from lightning_longctx.loss import causal_lm_loss

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A size of the problem: ``tokens`` of one row, ``hidden`` width, ``vocabulary``."""

    tokens: int
    hidden: int
    vocabulary: int

    @property
    def name(self) -> str:
        """Such as ``2048x128x8192``."""
        return f"{self.tokens}x{self.hidden}x{self.vocabulary}"


#: Byte-level, small, common and large vocabularies. In float32: CPUs emulate bfloat16, many times slower.
CASES = (
    Case(8192, 128, 320),
    Case(2048, 128, 8192),
    Case(1024, 256, 32768),
    Case(512, 128, 131072),
    Case(1024, 768, 32768),
)

Way = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


def plain(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> Tensor:
    """Logits of the whole row, then cross entropy."""
    logits = F.linear(hidden[0], weight)
    per_token = F.cross_entropy(logits, batch["shift_labels"][0], reduction="none")
    return per_token.sum() / float(batch["loss_divisor"])


def torch_chunked(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> Tensor:
    """PyTorch's chunked ``linear_cross_entropy`` with an output per token."""
    options = torch.nn.LinearCrossEntropyOptions()
    labels = batch["shift_labels"][0]
    per_token = F.linear_cross_entropy(hidden[0], weight, labels, reduction="none", options=options)
    return per_token.sum() / float(batch["loss_divisor"])


def ours(logits: int | None = None) -> Way:
    """``causal_lm_loss`` with so many logits in a chunk; None: its own default."""

    def run(hidden: Tensor, weight: Tensor, batch: dict[str, Any]) -> Tensor:
        chunk = None if logits is None else max(1, logits // weight.shape[0])
        return causal_lm_loss(hidden, weight, batch, chunk_tokens=chunk).loss

    return run


def make_inputs(case: Case) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Random inputs; one label in eight has no target."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, case.tokens, case.hidden, generator=generator).requires_grad_()
    weight = torch.randn(case.vocabulary, case.hidden, generator=generator) / case.hidden**0.5
    labels = torch.randint(0, case.vocabulary, (1, case.tokens), generator=generator)
    labels[0, ::8] = -100
    return hidden, weight.requires_grad_(), {"shift_labels": labels, "loss_divisor": case.tokens}


def step(way: Way, inputs: tuple[Tensor, Tensor, dict[str, Any]]) -> float:
    """Forward and backward; the seconds they took."""
    inputs[0].grad = inputs[1].grad = None
    start = time.perf_counter()
    way(*inputs).backward()
    return time.perf_counter() - start


def peak_extra_bytes(way: Way, inputs: tuple[Tensor, Tensor, dict[str, Any]]) -> int:
    """What a way holds at its worst moment beyond its inputs and the gradients of these."""
    inputs[0].grad = inputs[1].grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        way(*inputs).backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - sum(tensor.numel() * tensor.element_size() for tensor in inputs[:2])


def measure(case: Case, ways: dict[str, Way], repeats: int) -> dict[str, Any]:
    """Times, ratios to the first way, and memory, of each way.

    A way that takes more than five times as long as the first is timed in the first turn only: its ratio is clear, and
    it would make up most of the run.
    """
    inputs = make_inputs(case)
    memory = {name: peak_extra_bytes(way, inputs) for name, way in ways.items()}  # also the warm-up
    base = next(iter(ways))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats):
        names = [name for name in ways if not turn or times[name][0] <= 5 * times[base][0]]
        for name in names if turn % 2 else reversed(names):
            times[name].append(step(ways[name], inputs))
    return {
        name: {
            "seconds": statistics.median(seconds),
            "time_ratio": statistics.median(mine / first for mine, first in zip(seconds, times[base], strict=False)),
            "extra_mib": memory[name] / MIB,
            "turns": len(seconds),
        }
        for name, seconds in times.items()
    }


def heading(names: list[str]) -> str:
    """The first two lines of a markdown table."""
    return "| tokens x hidden x vocabulary | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|"


def row(case: Case, ways: dict[str, Any]) -> str:
    """A line of the table: time (ratio to the first way) and extra memory of each way."""
    first, *others = ways.values()
    cells = [f"{first['seconds']:.2f} s, {first['extra_mib']:.0f} MiB"]
    cells += [f"{way['time_ratio']:.2f} x, {way['extra_mib']:.0f} MiB" for way in others]
    return f"| {case.name} | " + " | ".join(cells) + " |"


def figures(results: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Time and memory of each case, against each peer."""
    found = []
    for case, ways in results.items():
        mine = ways["causal_lm_loss"]
        for peer in (name for name in ways if name in ("plain", "linear_cross_entropy")):
            label, theirs = _PEERS[peer], ways[peer]
            # The ratio is the median over turns; seconds on a busy machine would give another one.
            time = mine["time_ratio"] / theirs["time_ratio"]
            found.append(Figure(f"{case}: time", time, "x", label, 1.0))
            found.append(Figure(f"{case}: extra memory", mine["extra_mib"], "MiB", label, theirs["extra_mib"]))
    return found


_PEERS = {"plain": "plain cross entropy", "linear_cross_entropy": "torch linear_cross_entropy"}


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--repeats", type=int, default=9, help="turns; the median is reported (default: 9)")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], help="further chunk sizes of ours, in logits")
    parser.add_argument("--cases", nargs="*", default=[], help="names of cases, such as 2048x128x8192 (default: all)")
    parser.add_argument("--skip", nargs="*", default=[], help="ways to leave out, such as linear_cross_entropy")
    arguments = parser.parse_args()
    ways: dict[str, Way] = {"plain": plain, "causal_lm_loss": ours()}
    ways |= {f"{logits:,} logits": ours(logits) for logits in arguments.chunks}
    ways |= {"linear_cross_entropy": torch_chunked}
    ways = {name: way for name, way in ways.items() if name not in arguments.skip}
    print(f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads\n")
    print(heading(list(ways)))
    results = {}
    for case in CASES:
        if not arguments.cases or case.name in arguments.cases:
            results[case.name] = measure(case, ways, arguments.repeats)
            print(row(case, results[case.name]), flush=True)
            if arguments.json:  # after each case, since a whole run takes long on a small machine
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
