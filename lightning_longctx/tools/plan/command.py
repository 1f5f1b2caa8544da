"""``longctx plan``: read, simulate, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import yaml

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.memory import MemorySettings, Switch, next_switches, possible_sp_sizes
from lightning_longctx.tools.configuration import ReadConfiguration
from lightning_longctx.tools.output import make_folders, write_json
from lightning_longctx.tools.plan.options import PlanOptions, read_options
from lightning_longctx.tools.plan.plot import check_plot, save_plot
from lightning_longctx.tools.plan.reading import Run, read_run
from lightning_longctx.tools.plan.report import PlanReport, Variant
from lightning_longctx.tools.plan.search import Planner, all_changes, combine, last_of_each, nested
from lightning_longctx.units import GIB, counted

__all__ = ["main", "plan"]

Tell: TypeAlias = Callable[[str], object]

_INT32 = 2**31 - 1
_STRATEGY = "trainer.strategy"
# So many seconds without a line are long for somebody who waits.
_SILENCE = 2.0


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx plan``.
        read: reads the words that belong to the configuration.

    Returns:
        0 if the configured run fits, 1 if it does not.

    Raises:
        ConfigurationError: an option or setting that cannot work, or a model that cannot be simulated.
    """
    options, rest = read_options(words)
    plot = options.plot or options.folder / "plan.png"
    check_plot(plot)
    files = {"--plot": plot, "--json": options.json, "--write": options.write}
    make_folders({"--out": options.folder, **{flag: file and file.parent for flag, file in files.items()}})
    tell = partial(print, file=sys.stderr)
    tell("Reading the configuration, and building the model by its shapes.")
    run = read_run(read(rest), options)
    report, switches = plan(run, options, tell=tell)
    print(report.to_text())
    (options.folder / "plan.md").write_text(report.to_text(), encoding="utf-8")
    write_json(options.json, report.to_plain())
    if options.write is not None and switches is not None:
        options.write.write_text(_as_yaml(switches, run), encoding="utf-8")
    save_plot(plot, report.variants, options.device_gb)
    print(f"Table in {options.folder}, plot in {plot}.")
    print(_next(rest, options, switches))
    return 0 if report.fits else 1


def plan(run: Run, options: PlanOptions, tell: Tell | None = None) -> tuple[PlanReport, list[Switch] | None]:
    """Simulate the run as configured, and with other switches.

    Args:
        run: what is configured.
        options: ``device_gb``, ``host_gb``, ``write`` and ``brief`` are read.
        tell: called with a line at the beginning of each stage, and every few seconds; None for silence.

    Returns:
        The report, and the fewest switches that make it fit: none where it fits already, None where nothing helps.
    """
    host = None if options.host_gb is None else int(options.host_gb * GIB)
    progress = _Progress(tell)
    planner = Planner(run, int(options.device_gb * GIB), host, progress.simulated)
    variants: list[Variant] = []
    configured = _with_heads(planner, run.settings)
    wanted = _variants(configured)
    for number, (name, settings) in enumerate(wanted, 1):
        progress.begin(f"{name} ({number} of {len(wanted)})")
        peaks = planner.peaks(settings)
        longest = None if options.brief else planner.longest(settings)
        variants.append(Variant(name, peaks, planner.shortage(peaks) <= 0, longest))
    if not variants[0].fits:
        progress.begin("the fewest switches that make it fit")
    switches = planner.smallest_fit(configured)
    facts = {
        "parameters": sum(parameter.numel() for parameter in run.template.parameters()),
        "tokens": run.step.tokens,
        "world_size": run.settings.world_size,
        "ranks_per_node": run.ranks_per_node,
        "sequence_parallel_size": run.settings.sequence_parallel_size,
        "precision": run.step.precision,
        "device_gib": options.device_gb,
        "switched_on": run.settings.switched_on(),
        "smallest_fit": None if switches is None else [switch.name for switch in switches],
    }
    return PlanReport(facts, variants, _advice(switches), _notes(run, variants)), switches


class _Progress:
    """Lines for somebody who waits: each stage as it begins, and within it how many steps were simulated by now."""

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell or (lambda line: None)
        self._simulated = 0
        self._told = perf_counter()

    def begin(self, stage: str) -> None:
        """Tell what comes."""
        self._say(f"Simulating: {stage}.")

    def simulated(self) -> None:
        """Count a simulated step, and tell it if nothing was told for a while."""
        self._simulated += 1
        if perf_counter() - self._told >= _SILENCE:
            self._say(f"  ... {counted(self._simulated, 'step')} simulated so far")

    def _say(self, line: str) -> None:
        self._tell(line)
        self._told = perf_counter()


def _next(words: Sequence[str], options: PlanOptions, switches: Sequence[Switch] | None) -> str:
    """What to do with the plan, as a command."""
    # What was planned, also where options changed the configuration.
    changed = [f"--trainer.devices={options.devices}"] if options.devices else []
    changed += [f"--data.max_seq_len={options.max_seq_len}"] if options.max_seq_len else []
    given = shlex.join([*words, *changed])
    if switches is None:
        return "Next: a shorter row (--max-seq-len 64K) or more devices (--devices 8), and plan again."
    if not switches:
        return f"Next: `longctx check {given} --device-gb {options.device_gb:g}`, which does all of a start but train."
    if options.write is not None:
        return f"Next: `longctx fit {given} --config {options.write}`, which switches these on."
    return "Next: the same command with `--write fits.yaml`, then `longctx fit " + f"{given} --config fits.yaml`."


def _variants(settings: MemorySettings) -> list[tuple[str, MemorySettings]]:
    """As configured, with one change each, and with all of them."""
    switches = next_switches(settings)
    found = [("as configured", settings), *((f"+ {switch.name}", switch.settings) for switch in switches)]
    everything = last_of_each(switches)
    if len(everything) > 1:
        found.append(("+ all of them", combine(settings, everything)))
    return found


def _with_heads(planner: Planner, settings: MemorySettings) -> MemorySettings:
    """Let a module without a ``config`` say which sequence-parallel sizes its heads allow: larger ones are refused."""
    if settings.heads is not None:
        return settings
    planner.peaks(settings)  # what is wrong with the run itself is an error
    sizes = possible_sp_sizes(settings.world_size, None, settings.data_parallel_replicate_size)
    for size in (size for size in reversed(sizes) if size > settings.sequence_parallel_size):
        try:
            planner.peaks(replace(settings, sequence_parallel_size=size))
        except ConfigurationError:
            continue
        return replace(settings, heads=size)  # those that divide it are possible too
    return replace(settings, heads=settings.sequence_parallel_size)


def _advice(switches: Sequence[Switch] | None) -> str:
    if switches is None:
        return "No set of switches makes it fit: take a shorter row, more or larger devices."
    if not switches:
        return "Nothing has to be switched on."
    return f"The fewest switches that make it fit: {', '.join(f'`{switch.name}`' for switch in switches)}."


def _notes(run: Run, variants: Sequence[Variant]) -> list[str]:
    settings, tokens = run.settings, run.step.tokens
    notes = list(run.notes)
    if settings.heads is not None:
        sizes = possible_sp_sizes(settings.world_size, settings.heads, settings.data_parallel_replicate_size)
        notes.append(
            f"{counted(settings.heads, 'query head')} on {counted(settings.world_size, 'device')}:"
            f" sequence_parallel_size {sizes}."
        )
    positions = getattr(getattr(run.template, "config", None), "max_position_embeddings", None)
    if positions is not None and positions < max(tokens, *(variant.longest or 0 for variant in variants)):
        notes.append(
            f"The model has {counted(positions, 'position')}: documents longer than that need"
            " `max_position_embeddings`."
        )
    for variant in variants[:1]:
        elements, shape = variant.peaks.largest
        over = "more than" if elements > _INT32 else "within"
        notes.append(
            f"The largest tensor, {list(shape)}, has {counted(elements, 'element')}: {over} the {_INT32:,} that kernels"
            " with 32-bit indices can address."
        )
    notes += [
        f"Left out: `{name}`, which finds nothing to act on in this model."
        for name in sorted(settings.refused_by_module)
    ]
    return notes


def _as_yaml(switches: Sequence[Switch], run: Run) -> str:
    """The switches as a second configuration file. Classes are named, so that their other settings stay."""
    changes: dict[str, Any] = {}
    for key, value in all_changes(switches).items():
        if key.startswith(_STRATEGY):
            changes.setdefault(f"{_STRATEGY}.class_path", "lightning_longctx.strategies.LongContextFSDPStrategy")
            changes[key] = value
        else:
            section, _, rest = key.partition(".")
            changes.setdefault(f"{section}.class_path", run.model_class)
            changes[f"{section}.init_args.{rest}"] = value
    text = "# The fewest switches that fit: longctx fit --config run.yaml --config THIS_FILE\n"
    return text + (yaml.safe_dump(nested(changes), sort_keys=False) if changes else "{}\n")
