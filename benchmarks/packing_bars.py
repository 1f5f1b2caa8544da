"""What the adaptive policy must reach, judged on the figures of a run of the packing benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.packing_costs import PoolCost, RowCost, worst_growth
from benchmarks.packing_grid import OURS, RUNS, Cell, Figures, half_windows

__all__ = ["Bar", "cost_bars", "grid_bars", "half_window_bars"]

GATE = "fixed 24"
HARD_CELLS = ("mid-size 512K", "mid-size 1M")

#: ``results[cell][packer]``, the oracle of a cell under ``ORACLE``.
Results = Mapping[Cell, Mapping[str, Figures]]


@dataclass(frozen=True)
class Bar:
    """A requirement, what was found, and whether that is good enough; ``passed`` is None where nothing is judged."""

    rule: str
    found: str
    passed: bool | None

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or a dash."""
        return "-" if self.passed is None else "PASS" if self.passed else "FAIL"


def grid_bars(results: Results, oracles: Mapping[Cell, float], ranks: int) -> list[Bar]:
    """The bars on streams and windows; those whose cells were not run are left out.

    Args:
        results: all figures.
        oracles: fewest documents before a first row.
        ranks: streams of each cell; balance is judged for 8 only.
    """
    bars = []
    for cell in results:
        if cell.name in HARD_CELLS:
            bars += _cell_bars(cell.name, results[cell][OURS], oracles[cell])
    losses = [loss for cell, packers in results.items() for loss in _losses(cell, packers[OURS], packers[GATE])]
    full = sum(packers[OURS].steady >= 0.995 for packers in results.values())
    short = [f"{cell.name} {100 * packers[OURS].steady:.2f}" for cell, packers in results.items()
             if packers[OURS].steady < 0.995]  # fmt: skip
    needed = round(0.9 * len(results))
    bars.append(Bar("no cell worse than the gate of 24 in any of the three", "; ".join(losses) or "none", not losses))
    found = f"{full} of {len(results)}" + (f" (short: {', '.join(short)})" if short else "")
    bars.append(Bar(f"steady fill >= 99.5 % in at least {needed} of {len(results)} cells", found, full >= needed))
    return bars + [_balance_bar(packers[OURS], ranks) for cell, packers in results.items() if cell.name == "wide 1M"]


def _balance_bar(ours: Figures, ranks: int) -> Bar:
    found = (
        f"{ours.balanced:.2f}, {100 * ours.lost_balanced:.0f} % of attention time lost; "
        f"untreated {ours.imbalance:.2f}, {100 * ours.lost:.0f} %"
    )
    rule = f"wide 1M: attention work of {ranks} ranks with balance, max / mean <= 1.35 for 8"
    return Bar(rule, found, ours.balanced <= 1.35 if ranks == 8 else None)


def _cell_bars(name: str, ours: Figures, fewest: float) -> list[Bar]:
    found = f"{ours.documents:.1f}, oracle {fewest:.1f}"
    return [
        Bar(f"{name}: documents before the first row <= oracle + 1", found, ours.documents <= fewest + 1),
        Bar(f"{name}: first fill >= 98.5 %", f"{100 * ours.first:.2f} %", ours.first >= 0.985),
        Bar(f"{name}: steady fill >= 99.8 %", f"{100 * ours.steady:.2f} %", ours.steady >= 0.998),
        Bar(f"{name}: pool <= 6 windows", f"{ours.pool:.1f}", ours.pool <= 6),
        Bar(f"{name}: wait <= 32 rows", f"{ours.max_wait}", ours.max_wait <= 32),
    ]


def _losses(cell: Cell, ours: Figures, gate: Figures) -> list[str]:
    losses = []
    if ours.documents > gate.documents:
        losses.append(f"{cell.name} documents {ours.documents:.1f} > {gate.documents:.1f}")
    if ours.first < gate.first:
        losses.append(f"{cell.name} first {100 * ours.first:.2f} < {100 * gate.first:.2f}")
    if ours.steady < gate.steady:
        losses.append(f"{cell.name} steady {100 * ours.steady:.2f} < {100 * gate.steady:.2f}")
    return losses


def half_window_bars() -> list[Bar]:
    """Documents of just over half a window: an early start, and a pool that stops growing."""
    early, late = half_windows(RUNS[OURS], 300), half_windows(RUNS[OURS], 1200)
    window = 131_072
    pools = early.peak_pool_tokens / window, late.peak_pool_tokens / window
    rule = "half windows: the pool of 1,200 rows is no larger than that of 300"
    return [
        Bar(
            "half windows: documents before the first row <= 6", f"{early.first_documents}", early.first_documents <= 6
        ),
        Bar(rule, f"{pools[1]:.1f} and {pools[0]:.1f} windows", pools[1] <= pools[0]),
    ]


def cost_bars(pools: list[PoolCost], row: RowCost) -> list[Bar]:
    """What packing may cost the main process."""
    full = next(cost for cost in pools if cost.documents == 4096)
    growth = worst_growth(pools)
    found = f"{row.median:.1f} ms, mean {row.mean:.1f}, worst {row.worst:.1f}"
    return [
        Bar("processor time of a row from a pool of 4,096 <= 10 ms", f"{full.worst:.1f} ms", full.worst <= 10),
        Bar("growth to 20,000 against n log n <= 1", f"{growth:.2f}", growth <= 1),
        Bar("main process, a row of 1M real tokens: median < 50 ms", found, row.median < 50),
    ]
