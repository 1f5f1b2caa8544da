"""Buffer policies against other packers, on streams of document lengths: how soon, how full, at what cost.

Every packer sees the same streams in one run. Then: what each piece of the adaptive policy earns, what packing costs
the main process, and whether all bars are met (exit status 1 if not).

    python -m benchmarks.packing [--full] [--seeds N] [--micro-batches N] [--json PATH] [--docs PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.packing_bars import Bar, cost_bars, grid_bars, half_window_bars
from benchmarks.packing_costs import pool_costs, row_costs
from benchmarks.packing_grid import (
    OURS,
    RUNS,
    Cell,
    Figures,
    Grid,
    half_windows,
    measure,
    oracle,
    overview,
    run_variant,
)
from benchmarks.packing_pieces import CHANGED, LADDER, WITHOUT, Variant
from benchmarks.packing_streams import STREAMS
from benchmarks.packing_tables import (
    ablation_table,
    bar_table,
    cell_table,
    overview_table,
    policy_table,
    pool_table,
    write_tables,
)
from lightning_longctx.units import parse_token_count

PARTS = ("grid", "ablation", "costs")


@dataclass
class Report:
    """What a run found: tables by name, bars, and all numbers for JSON."""

    tables: dict[str, str] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        """Keep a table, and print it."""
        self.tables[name] = text
        print(f"{text}\n", flush=True)


def run_grid(report: Report, grid: Grid) -> None:
    """All packers on all cells, and the oracle of each cell."""
    results: dict[Cell, dict[str, Figures]] = {}
    oracles: dict[Cell, float] = {}
    for cell in grid.cells():
        oracles[cell] = oracle(grid, cell)
        results[cell] = {name: measure(run, grid, cell) for name, run in RUNS.items()}
        print(f"{cell_table(cell, results[cell], oracles[cell])}\n", flush=True)
    report.add("policies", policy_table(results, oracles))
    report.add("packers", overview_table({name: [packers[name] for packers in results.values()] for name in RUNS}))
    report.bars += grid_bars(results, oracles, len(grid.seeds)) + half_window_bars()
    report.numbers["grid"] = {
        cell.name: {"oracle": oracles[cell], **{name: rounded(asdict(figures)) for name, figures in packers.items()}}
        for cell, packers in results.items()
    }


def run_ablation(report: Report, grid: Grid) -> None:
    """The adaptive policy a piece at a time, without single pieces, and with other numbers."""
    parts = {"ladder": ("pieces", LADDER), "without": ("all but", WITHOUT), "changed": ("all, with", CHANGED)}
    for name, (head, variants) in parts.items():
        found = {label: _variant(grid, variant) for label, variant in variants.items()}
        report.add(name, ablation_table(head, found))
        report.numbers[name] = found


def _variant(grid: Grid, variant: Variant) -> dict[str, float]:
    run = run_variant(variant)
    view = overview([measure(run, grid, cell) for cell in grid.cells()])
    half = half_windows(run, 300)
    return rounded({**view, "half_first": half.first_documents, "half_pool": half.peak_pool_tokens / 131_072})


def run_costs(report: Report) -> None:
    """Processor time of the main process."""
    pools, row = pool_costs(), row_costs()
    report.add("pools", pool_table(pools))
    report.bars += cost_bars(pools, row)
    report.numbers["costs"] = {"pools": [rounded(asdict(cost)) for cost in pools], "row": rounded(asdict(row))}


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """Six digits tell everything that was measured."""
    return {name: round(value, 6) for name, value in numbers.items()}


def figures(results: dict[str, Any]) -> list[Figure]:
    """Means over all streams and windows against every other packer."""
    grid = list(results["grid"].values())

    def mean(packer: str, what: str) -> float:
        return sum(cell[packer][what] for cell in grid) / len(grid)

    found = []
    for peer in (name for name in RUNS if name != OURS):
        documents, first, steady = ((mean(OURS, what), mean(peer, what)) for what in ("documents", "first", "steady"))
        found.append(Figure("documents before the first row", documents[0], "", peer, documents[1]))
        found.append(Figure("first fill", 100 * first[0], "%", peer, 100 * first[1], more_is_better=True))
        found.append(Figure("steady fill", 100 * steady[0], "%", peer, 100 * steady[1], more_is_better=True))
    missed = sum(bar["passed"] is False for bar in results["bars"])
    return [*found, Figure("of its own bars, not met", missed, "", bar=0)]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="8 seeds x 300 rows, ablation with 3 seeds")
    parser.add_argument("--seeds", type=int, help="streams of each cell (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it (default: 0)")
    parser.add_argument("--micro-batches", type=int, help="rows of each run (default: 100)")
    parser.add_argument("--ablation-seeds", type=int, help="streams of each cell in the ablation (default: 2)")
    parser.add_argument("--streams", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--windows", nargs="+", default=["32K", "128K", "512K", "1M"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (default: all)")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--docs", type=Path, help="also replace the tables of this page")
    arguments = parser.parse_args(argv)
    for name, small, full in (("seeds", 3, 8), ("micro_batches", 100, 300), ("ablation_seeds", 2, 3)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, full if arguments.full else small)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print their tables, judge the bars; 1 if one is not met."""
    arguments = _arguments(argv)
    windows = tuple(parse_token_count(window, "--windows") for window in arguments.windows)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    grid = Grid(tuple(seeds), arguments.micro_batches, tuple(arguments.streams), windows)
    few = Grid(grid.seeds[: arguments.ablation_seeds], grid.micro_batches, grid.streams, windows)
    report = Report()
    report.add(
        "method",
        f"{date.today()}, Python {platform.python_version()}, {os.cpu_count()} CPU cores. Lengths only; seeds "
        f"{seeds[0]} to {seeds[-1]}, {grid.micro_batches} rows each; ablation with the first {len(few.seeds)} seeds.",
    )
    if "grid" in arguments.parts:
        run_grid(report, grid)
    if "ablation" in arguments.parts:
        run_ablation(report, few)
    if "costs" in arguments.parts:
        run_costs(report)
    report.add("bars", bar_table(report.bars))
    if arguments.json:
        bars = [{**asdict(bar), "verdict": bar.verdict} for bar in report.bars]
        numbers = {"method": report.tables["method"], "bars": bars, **report.numbers}
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if arguments.docs:
        write_tables(arguments.docs, report.tables)
    return int(any(bar.passed is False for bar in report.bars))


if __name__ == "__main__":
    raise SystemExit(main())
