"""All benchmarks, one after another: figures of each feature next to its peers' as a table and as CSV.

Each runs in a process of its own and writes its numbers; its ``figures`` puts them next to the peers'. A benchmark that
fails does not stop the others, and is told at the end.

    python -m benchmarks [NAME ...] [--quick] [--csv PATH] [--docs PATH] [--list]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.figures import Figure, figure_table
from benchmarks.packing_tables import write_tables
from lightning_longctx.tools.versions import installed_versions

__all__ = ["BENCHMARKS", "Benchmark", "main"]

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Benchmark:
    """One script.

    Attributes:
        about: what it compares, in a few words.
        quick: arguments of a run of a minute or so; its figures are rough.
        needs_gpu: means nothing without one.
    """

    about: str
    quick: tuple[str, ...] = ()
    needs_gpu: bool = False


BENCHMARKS: Mapping[str, Benchmark] = {
    "packing": Benchmark(
        "buffer policies against other packers", ("--seeds", "1", "--micro-batches", "30", "--parts", "grid")
    ),
    "mix": Benchmark("the packed mix against the weights", ("--seeds", "1", "--rows", "60")),
    "data_wait": Benchmark(
        "waits for rows in both runtimes", ("--rows", "20", "--seconds", "0.1", "--first-seconds", "0.3")
    ),
    "loss": Benchmark("`causal_lm_loss` against other cross entropies", ("--repeats", "3", "--cases", "2048x128x8192")),
    "training": Benchmark(
        "a training step against plain Hugging Face with FSDP2", ("--tokens", "1024", "--turns", "1")
    ),
    "channel_loss": Benchmark("`ChannelLoss` against a loop, and in a step", ("--repeats", "5", "--steps", "6")),
    "moe_router": Benchmark("`MoERouterHeatmap` in a step", ("--repeats", "3")),
    "checkpoint": Benchmark("a save against memcpy, torch and Lightning", ("--megabytes", "60", "--turns", "2")),
    "offload": Benchmark("simulated memory of an 8B model with offload", ("--tokens", "8192", "--layers", "8")),
    "offload_time": Benchmark("step time with offload", needs_gpu=True),
}

Results = dict[str, list[Figure]]


def run_all(names: Sequence[str], quick: bool) -> tuple[Results, dict[str, str]]:
    """Run benchmarks.

    Args:
        names: which.
        quick: with their quick arguments.

    Returns:
        Figures by name, and why the others have none.
    """
    results: Results = {}
    missing: dict[str, str] = {}
    for name in names:
        benchmark = BENCHMARKS[name]
        if benchmark.needs_gpu and not torch.cuda.is_available():
            missing[name] = "needs a GPU"
            continue
        print(f"\n== {name}: {benchmark.about}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "numbers.json"
            words = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *(benchmark.quick * quick)]
            code = subprocess.run(words, cwd=ROOT, check=False).returncode  # 1: a bar of its own was not met
            if not path.exists():
                missing[name] = f"failed with exit status {code}"
                continue
            results[name] = import_module(f"benchmarks.{name}").figures(json.loads(path.read_text()))
    return results, missing


def machine() -> dict[str, str]:
    """What the figures were measured on, and when."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    about = {"date": date.today().isoformat(), "device": device, "cores": str(os.cpu_count())}
    return about | {"processor": _processor()} | installed_versions()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def write_csv(path: Path, results: Results) -> None:
    """A line for each figure, with everything that is known about the run."""
    about = machine()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ("benchmark", "what", "ours", "unit", "peer", "theirs", "ratio", "against_peer", "bar", "bar_verdict")
        writer.writerow([*head, *about])
        for name, figures in results.items():
            for one in figures:
                row = (one.what, one.ours, one.unit, one.peer, one.theirs, one.ratio, one.against_peer, one.bar)
                writer.writerow([name, *row, one.bar_verdict, *about.values()])


def page_text(results: Results, missing: Mapping[str, str]) -> str:
    """What stands on the page of results."""
    about = machine()
    lost = [
        f"{name}: {one.what}" for name, figures in results.items() for one in figures if one.against_peer == "worse"
    ]
    failed = [
        f"{name}: {one.what}" for name, figures in results.items() for one in figures if one.bar_verdict == "FAIL"
    ]
    parts = [", ".join(f"{name} {value}" for name, value in about.items()) + "."]
    parts += [f"Not run: {name} ({why})." for name, why in missing.items()]
    parts += [f"Worse than a peer: {'; '.join(lost) or 'nothing'}.", f"Bars not met: {'; '.join(failed) or 'none'}."]
    parts += [f"### {name}\n\n{BENCHMARKS[name].about}\n\n{figure_table(found)}" for name, found in results.items()]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if a bar is not met or a benchmark fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--quick", action="store_true", help="a minute or so each; rough")
    parser.add_argument("--csv", type=Path, help="write all figures here, with machine, versions and date")
    parser.add_argument("--docs", type=Path, help="replace the figures on this page")
    parser.add_argument("--list", action="store_true", help="tell what there is, and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:13} {benchmark.about}" for name, benchmark in BENCHMARKS.items()))
        return 0
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(BENCHMARKS)}")
    results, missing = run_all(options.names or list(BENCHMARKS), options.quick)
    text = page_text(results, missing)
    print(f"\n{text}")
    if options.csv:
        write_csv(options.csv, results)
    if options.docs:
        write_tables(options.docs, {"benchmarks": text})
    broken = [why for why in missing.values() if why != "needs a GPU"]
    missed = [one for figures in results.values() for one in figures if one.bar_verdict == "FAIL"]
    return int(bool(broken or missed))


if __name__ == "__main__":
    raise SystemExit(main())
