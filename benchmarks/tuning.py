"""What ``longctx plan`` says of an 8B model at four lengths: the tables of ``docs/tuning.md``. No GPU is needed.

usage:
    python -m benchmarks.tuning [--lengths 32K 128K 512K 1M] [--docs PATH]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.packing_tables import table, write_tables
from lightning_longctx.cli.tools import Configuration
from lightning_longctx.strategies.memory import MemorySettings, next_switches
from lightning_longctx.tools.plan.command import plan
from lightning_longctx.tools.plan.options import read_options
from lightning_longctx.tools.plan.reading import read_run
from lightning_longctx.tools.plan.report import PlanReport
from lightning_longctx.tools.plan.search import Planner, combine, last_of_each, with_margin
from lightning_longctx.units import GIB

LENGTHS = ("32K", "128K", "512K", "1M")
DEVICE_GIB = 80

#: Llama-3.1-8B by its shapes, on one node of eight devices.
CONFIG = {
    "trainer": {"devices": 8, "precision": "bf16-true", "strategy": "LongContextFSDPStrategy"},
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 1048576,
        }
    },
    "data": {"sources": {"any": "python-stdlib"}},
}


@dataclass(frozen=True)
class Found:
    """What the plan says at one length: the report, the fewest switches, and peaks with margin in GiB of ladders."""

    report: PlanReport
    fewest: tuple[str, ...]
    with_fewest: float
    ladder: tuple[tuple[str, float, float, bool], ...]

    def switches(self) -> str:
        """The part of the command's output that names switches, as it is printed."""
        lines = self.report.to_text().splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("| change"))
        rows = [line for line in lines[start:] if line.startswith("|")]
        said = [line for line in lines[2:7] if line and not line.startswith("Switched")]
        return "\n".join(["```text", *said, "", *rows, "```"])


def look(length: str) -> Found:
    """Plan one length: each switch alone, the fewest that fit, and all of them one after another."""
    words = ["--config", json.dumps(CONFIG), "--device-gb", str(DEVICE_GIB), "--max-seq-len", length, "--brief"]
    options, rest = read_options(words)
    run = read_run(Configuration(rest), options)
    report, switches = plan(run, options)
    planner = Planner(run, DEVICE_GIB * GIB)
    fewest = planner.peaks(combine(run.settings, switches or []))
    return Found(
        report,
        tuple(switch.name for switch in switches or []),
        with_margin(fewest.peak) / GIB,
        tuple(_ladder(planner)),
    )


def _ladder(planner: Planner) -> list[tuple[str, float, float, bool]]:
    """Switches turned on one after another, in the order in which the suite advises them."""
    rungs = []
    for name, state in [("nothing", planner.run.settings), *_turned_on(planner)]:
        peaks = planner.peaks(state)
        host = peaks.host * planner.run.ranks_per_node / GIB
        rungs.append((name, with_margin(peaks.peak) / GIB, host, planner.shortage(peaks) <= 0))
    return rungs


def _turned_on(planner: Planner) -> list[tuple[str, MemorySettings]]:
    settings = planner.run.settings
    found: list[tuple[str, MemorySettings]] = []
    for switch in last_of_each(next_switches(settings)):
        settings = combine(settings, [switch])
        found.append((f"+ {switch.name}", settings))
    return found


def overview(found: dict[str, Found]) -> str:
    """A line for each length."""
    rows = (
        [
            length,
            f"{with_margin(item.report.variants[0].peaks.peak) / GIB:.0f}",
            ", ".join(f"`{name}`" for name in item.fewest) or "none",
            f"{item.with_fewest:.0f}",
            f"{item.ladder[-1][1]:.0f}",
        ]
        for length, item in found.items()
    )
    return table(
        ["length", "GiB with nothing", "the fewest switches that fit 80", "GiB with them", "GiB with all"], rows
    )


def ladders(found: dict[str, Found]) -> str:
    """Each switch on top of those before it, at each length."""
    names = [name for name, *_ in next(iter(found.values())).ladder]
    rows = (
        [f"`{name.removeprefix('+ ')}`" if number else name, *(_cell(item.ladder[number]) for item in found.values())]
        for number, name in enumerate(names)
    )
    return table(["turned on, from top to bottom", *found], rows)


def _cell(rung: tuple[str, float, float, bool]) -> str:
    _, device, host, fits = rung
    return f"{'' if not fits else 'fits: '}{device:.0f}{f' (host {host:.0f})' if host else ''}"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--docs", type=Path, help="also replace the tables of this page")
    options = parser.parse_args(words)
    found = {length: look(length) for length in options.lengths}
    tables = {f"plan {length}": item.switches() for length, item in found.items()}
    tables |= {"lengths": overview(found), "ladders": ladders(found)}
    print("\n\n".join(tables.values()))
    if options.docs:
        write_tables(options.docs, tables)


if __name__ == "__main__":
    main()
