"""All benchmarks, one after another: figures of each feature next to its peers' as a table and as CSV.

Each runs in a process of its own and writes its numbers; its ``figures`` puts them next to the peers'. A benchmark that
fails does not stop the others, and is told at the end. The CSV file keeps the last figures of each benchmark, so one of
them can be run anew; the page is made from the file.

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
        full: arguments of a run whose figures may stand on a page.
        needs_gpu: means nothing without one.
    """

    about: str
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    needs_gpu: bool = False


BENCHMARKS: Mapping[str, Benchmark] = {
    "packing": Benchmark(
        "buffer policies against other packers, means over all streams and windows",
        ("--seeds", "1", "--micro-batches", "30", "--parts", "grid"),
        ("--full",),  # with 3 streams of a cell its bars are a matter of luck
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
Row = dict[str, str]

_FIGURE = ("what", "ours", "unit", "peer", "theirs", "ratio", "against_peer", "bar", "bar_verdict", "more_is_better")
_HEAD = ("benchmark", *_FIGURE)


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
            more = benchmark.quick if quick else benchmark.full
            words = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *more]
            # In the folder that goes away, since a run of the command line leaves files where it starts.
            run = subprocess.run(words, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
            code = run.returncode  # 1: a bar of its own was not met
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


def to_rows(results: Results) -> list[Row]:
    """A row for each figure, with everything that is known about the run."""
    about = machine()
    return [
        {"benchmark": name}
        | {column: "" if (value := getattr(one, column)) is None else str(value) for column in _FIGURE}
        | about
        for name, figures in results.items()
        for one in figures
    ]


def merge_csv(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Put rows into a file in place of the older ones of the same benchmarks.

    Returns:
        All rows of the file, in the order of :data:`BENCHMARKS`.
    """
    new = {row["benchmark"] for row in rows}
    kept: list[Row] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [
                row for row in csv.DictReader(file) if row["benchmark"] in BENCHMARKS and row["benchmark"] not in new
            ]
    merged = sorted([*kept, *rows], key=lambda row: list(BENCHMARKS).index(row["benchmark"]))
    columns = dict.fromkeys(column for row in merged for column in row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(merged)
    return merged


def page_text(rows: Sequence[Row], missing: Mapping[str, str]) -> str:
    """What stands on the page of results."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row["benchmark"], []).append(row)
    figures = {name: [_figure(row) for row in found] for name, found in sections.items()}
    lost = [f"{name}: {one.what}" for name, found in figures.items() for one in found if one.against_peer == "worse"]
    failed = [f"{name}: {one.what}" for name, found in figures.items() for one in found if one.bar_verdict == "FAIL"]
    missing = {name: "needs a GPU" for name, benchmark in BENCHMARKS.items() if benchmark.needs_gpu} | dict(missing)
    parts = [f"Not run: {name} ({why})." for name, why in missing.items() if name not in sections]
    parts += [f"Worse than a peer: {'; '.join(lost) or 'nothing'}.", f"Bars not met: {'; '.join(failed) or 'none'}."]
    for name, found in sections.items():
        about = ", ".join(f"{key} {value}" for key, value in found[0].items() if key not in _HEAD and value)
        parts.append(f"### {name}\n\n{BENCHMARKS[name].about}; {about}.\n\n{figure_table(figures[name])}")
    return "\n\n".join(parts)


def _figure(row: Row) -> Figure:
    """The figure of a row of the file."""
    theirs, bar = (float(row[name]) if row[name] else None for name in ("theirs", "bar"))
    more = row["more_is_better"] == "True"
    return Figure(row["what"], float(row["ours"]), row["unit"], row["peer"], theirs, bar, more)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if a bar is not met or a benchmark fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--quick", action="store_true", help="a minute or so each; rough")
    parser.add_argument("--csv", type=Path, help="keep the figures here, with machine, versions and date")
    parser.add_argument("--docs", type=Path, help="replace the figures on this page, with all of the CSV file")
    parser.add_argument("--list", action="store_true", help="tell what there is, and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:13} {benchmark.about}" for name, benchmark in BENCHMARKS.items()))
        return 0
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(BENCHMARKS)}")
    results, missing = run_all(options.names or list(BENCHMARKS), options.quick)
    rows = to_rows(results)
    if options.csv:
        rows = merge_csv(options.csv, rows)
    text = page_text(rows, missing)
    print(f"\n{text}")
    if options.docs:
        write_tables(options.docs, {"benchmarks": text})
    broken = [why for why in missing.values() if why != "needs a GPU"]
    missed = [one for figures in results.values() for one in figures if one.bar_verdict == "FAIL"]
    return int(bool(broken or missed))


if __name__ == "__main__":
    raise SystemExit(main())
