"""The tables of the packing benchmark in markdown, and where they stand in a docs page."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.packing_bars import Bar
from benchmarks.packing_costs import PoolCost
from benchmarks.packing_grid import POLICIES, Cell, Figures, overview

__all__ = [
    "ablation_table",
    "bar_table",
    "cell_table",
    "overview_table",
    "policy_table",
    "pool_table",
    "table",
    "write_tables",
]


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table."""
    lines = [list(heads), *([str(value) for value in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(part: float, digits: int = 2) -> str:
    """Such as 99.89."""
    return f"{100 * part:.{digits}f}"


def cell_table(cell: Cell, packers: Mapping[str, Figures], fewest: float) -> str:
    """All packers on one stream and window."""
    heads = [f"{cell.name}, oracle {fewest:.1f}", "documents (slowest rank)", "first %", "steady %", "worst row %",
             "max wait", "pool, windows", "drift %", "imbalance", "balanced", "CPU ms"]  # fmt: skip
    rows = (
        [name, f"{f.documents:.1f} ({f.documents_worst})", percent(f.first, 1), percent(f.steady), percent(f.worst, 0),
         f.max_wait, f"{f.pool:.1f}", f"{100 * f.drift:+.1f}", f"{f.imbalance:.2f}", f"{f.balanced:.2f}",
         f"{f.cpu_ms:.2f}"]
        for name, f in packers.items()
    )  # fmt: skip
    return table(heads, rows)


def policy_table(results: Mapping[Cell, Mapping[str, Figures]], oracles: Mapping[Cell, float]) -> str:
    """The three policies on all cells, a line each."""
    rows = (
        [cell.name, f"{oracles[cell]:.1f}", *(_short(results[cell][name]) for name in POLICIES)] for cell in results
    )
    return table(["stream, window", "oracle", *POLICIES], rows)


def _short(f: Figures) -> str:
    fills = f"{percent(f.first, 1)} / {percent(f.steady)} / {percent(f.worst, 0)}"
    return f"{f.documents:.0f} ({f.documents_worst}) / {fills} / {f.max_wait} / {f.pool:.0f}"


def overview_table(packers: Mapping[str, list[Figures]], head: str = "packer") -> str:
    """A line for each packer, over all cells."""
    heads = [head, "documents", "first %", "steady %", "worst cell %", "cells >= 99.5 %", "wait: median, max",
             "pool: median, max", "drift %", "imbalance", "balanced", "CPU ms"]  # fmt: skip
    rows = []
    for name, figures in packers.items():
        view = overview(figures)
        rows.append(
            [name, f"{view['documents']:.1f}", percent(view["first"]), percent(view["steady"]),
             percent(view["worst_cell"]), f"{view['cells_above_99.5']:.0f}",
             f"{view['median_wait']:.0f}, {view['max_wait']:.0f}", f"{view['median_pool']:.0f}, {view['max_pool']:.0f}",
             percent(view["drift"], 1), f"{view['imbalance']:.2f}", f"{view['balanced']:.2f}", f"{view['cpu_ms']:.2f}"]
        )  # fmt: skip
    return table(heads, rows)


def ablation_table(head: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """What changes with a piece less or another number; the last column is for documents of half a window."""
    heads = [head, "documents", "first %", "steady %", "worst cell %", "cells >= 99.5 %", "max wait", "max pool",
             "CPU ms", "half windows: first, pool"]  # fmt: skip
    rows = (
        [name, f"{view['documents']:.1f}", percent(view["first"]), percent(view["steady"]),
         percent(view["worst_cell"]), f"{view['cells_above_99.5']:.0f}", f"{view['max_wait']:.0f}",
         f"{view['max_pool']:.0f}", f"{view['cpu_ms']:.2f}", f"{view['half_first']:.0f}, {view['half_pool']:.0f}"]
        for name, view in found.items()
    )  # fmt: skip
    return table(heads, rows)


def pool_table(costs: list[PoolCost]) -> str:
    """Processor time by size of the pool."""
    heads = ["documents in the pool", "usual, ms", "never full enough, ms", "the same, long documents first, ms"]
    rows = ([f"{c.documents:,}", *(f"{ms:.2f}" for ms in (c.usual, c.repaired, c.longest_first))] for c in costs)
    return table(heads, rows)


def bar_table(bars: list[Bar]) -> str:
    """Every bar with what was found."""
    return table(["bar", "found", ""], ([bar.rule, bar.found, bar.verdict] for bar in bars))


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Replace the tables of a docs page, each between a comment with its name and the comment ``end``."""
    text = page.read_text()
    for name, content in tables.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            sys.exit(f"{page} must have one place for the table {name!r}, has {count}")
    page.write_text(text)
