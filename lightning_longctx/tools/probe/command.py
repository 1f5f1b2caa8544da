"""``longctx probe``: read, compare, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.datamodules.choosing import POLICIES, resolve_policy
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.configuration import ReadConfiguration, RunConfiguration, layout_of
from lightning_longctx.tools.output import make_folders, write_json
from lightning_longctx.tools.probe.measures import PolicyFigures, histogram, policy_figures
from lightning_longctx.tools.probe.options import ProbeOptions, read_options
from lightning_longctx.tools.probe.plot import check_plot, save_plot
from lightning_longctx.tools.probe.replay import replay
from lightning_longctx.tools.probe.report import ProbeReport
from lightning_longctx.tools.probe.show import decoder_of, describe_row
from lightning_longctx.tools.probe.streams import MeasuredRows, Stream, read_streams
from lightning_longctx.topology import Topology
from lightning_longctx.units import counted

__all__ = ["complete_tokenizer", "main", "probe"]

Tell: TypeAlias = Callable[[str], object]


def main(words: Sequence[str], read: ReadConfiguration) -> int:
    """Run the command.

    Args:
        words: what follows ``longctx probe``.
        read: reads the words that belong to the configuration.

    Returns:
        0, or 1 if a fill is below ``--min-fill``.

    Raises:
        ConfigurationError: an option or setting that cannot work.
        DataError: the documents cannot be read, or are too few.
    """
    options, rest = read_options(words)
    plot = options.plot or options.folder / "probe.png"
    check_plot(plot)
    configuration = read(rest)
    layout = layout_of(configuration.settings)
    options = replace(options, dp=options.dp or layout.dp_size or 1, plot=plot)
    data = _data_module(configuration)
    data.check(layout.sp_size)
    complete_tokenizer(data, configuration)
    files = {"--plot": options.plot, "--json": options.json}
    make_folders({"--out": options.folder, **{flag: file and file.parent for flag, file in files.items()}})
    report, shown = probe(data, options, layout.sp_size, tell=partial(print, file=sys.stderr))
    print(report.to_text())
    for line in shown:
        print(line)
    _save(report, options)
    return 1 if report.problems else 0


def probe(
    data: DynamicBatchingDataModule, options: ProbeOptions, sp_size: int = 1, tell: Tell | None = None
) -> tuple[ProbeReport, list[str]]:
    """Measure the configured policy, and let the others choose from what was read.

    Args:
        data: the data module; its tokenizer is known.
        options: ``micro_batches``, ``dp``, ``seeds``, ``min_fill`` and ``show`` are read.
        sp_size: sequence-parallel size.
        tell: called with a line after each seed; None for silence.

    Returns:
        The report, and the lines of ``--show``.

    Raises:
        DataError: the documents cannot be read.
        ConfigurationError: a rank has no row, or ``min_fill`` has too few rows to judge.
    """
    dp_size = options.dp or 1
    topologies = [
        Topology(rank * sp_size, dp_size * sp_size, rank, dp_size, sp_size=sp_size) for rank in range(dp_size)
    ]
    measured: list[list[Stream]] = []  # by seed
    if tell is not None:
        rows_each = counted(options.micro_batches, "row")
        tell(f"Reading documents for {rows_each} on each of {counted(dp_size, 'rank')}.")
    for seed in options.seeds or (None,):
        start = perf_counter()
        measured.append(read_streams(data, topologies, seed, options.micro_batches, 0 if measured else options.show))
        _check_rows(measured[-1])
        if tell is not None:
            tell(f"Seed {measured[-1][0].seed}: {counted(dp_size, 'rank')} read in {perf_counter() - start:.1f} s.")
    if tell is not None:
        tell("Letting the other buffer policies choose from the same documents.")
    rows = _configured(data, topologies[0])
    settings, first = rows.settings, measured[0][0]
    policies = _compare(data, measured, rows, options.micro_batches)
    decode = decoder_of(settings.reader.tokenize)
    shown = [
        line
        for number, row in enumerate(first.kept)
        for line in (
            f"Row {number + 1} of rank 0, seed {first.seed}:",
            *describe_row(row, decode, data.source_names),
            "",
        )
    ]
    facts = {
        "max_seq_len": data.max_seq_len,
        "max_tokens_per_batch": data.max_tokens_per_batch,
        "count_mode": "effective" if settings.count_targets else "total",
        "data_parallel_ranks": dp_size,
        "sequence_parallel_size": sp_size,
        "micro_batches": options.micro_batches,
        "seeds": [streams[0].seed for streams in measured],
        "policy": policies[0].name,
        "balance": settings.balance,
        "min_fill": options.min_fill,
    }
    lengths = (
        entry.length for streams in measured for stream in streams for draw in stream.draws for entry in draw.entries
    )
    problems = [] if options.min_fill is None else _below(policies[0], options.min_fill)
    return ProbeReport(facts, policies, histogram(lengths), problems), shown


def _configured(data: DynamicBatchingDataModule, topology: Topology) -> MeasuredRows:
    """Rows that are only asked for their settings."""
    rows = data.row_builder(topology, kind=MeasuredRows)
    assert isinstance(rows, MeasuredRows)
    return rows


def _compare(
    data: DynamicBatchingDataModule, measured: Sequence[Sequence[Stream]], rows: MeasuredRows, micro_batches: int
) -> list[PolicyFigures]:
    own = next((name for name, make in POLICIES.items() if make is type(rows.policy)), type(rows.policy).__name__)
    window = data.max_tokens_per_batch
    streams = [stream for of_seed in measured for stream in of_seed]
    found = [policy_figures(own, rows.policy.describe(), streams, window, measured=True)]
    for name in POLICIES:
        if name == own:
            continue
        make = partial(resolve_policy, name, data.packing_facts)
        try:
            gate = make().describe()
        except ConfigurationError as error:
            found.append(policy_figures(name, name, [], window, measured=False, refused=str(error)))
            continue
        replayed = [stream for of_seed in measured for stream in replay(make, of_seed, rows.settings, micro_batches)]
        found.append(policy_figures(name, gate, replayed, window, measured=False))
    return found


def _below(policy: PolicyFigures, least: float) -> list[str]:
    """What is below the least fill, by seed, over all ranks."""
    problems = []
    seeds = list(dict.fromkeys(rank.seed for rank in policy.ranks))
    for seed, first, steady in zip(seeds, policy.first_fills, policy.steady_fills, strict=True):
        if steady is None:
            fix = "Raise --micro-batches, lower --dp, or give more documents."
            got = f"none before the documents ended (seed {seed})"
            raise ConfigurationError("--min-fill", "needs a micro-batch after the first one to judge", got, fix)
        for what, fill in (("First", first), ("Steady", steady)):
            if 100 * fill < least:
                problems.append(f"{what} fill {100 * fill:.2f} % is below --min-fill {least:g} (seed {seed}).")
    return problems


def _check_rows(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if not stream.rows:
            got = f"none for rank {stream.rank} of {len(streams)} (seed {stream.seed})"
            fix = "Lower --dp, or give more documents; check limits on lengths and `drop_last`."
            raise ConfigurationError("data.sources", "must give each data-parallel rank a row", got, fix)


def _data_module(configuration: RunConfiguration) -> DynamicBatchingDataModule:
    data: Any = configuration.build("data")
    if not isinstance(data, DynamicBatchingDataModule):
        got = "none" if data is None else type(data).__name__
        fix = "Other data modules pack in their own way, which probe does not know."
        raise ConfigurationError("data", "must be a DynamicBatchingDataModule", got, fix)
    return data


def complete_tokenizer(data: DynamicBatchingDataModule, configuration: RunConfiguration) -> None:
    """Get the model's tokenizer where the configuration says `from_model`; the model itself gets no weights."""
    if _configured(data, Topology()).settings.reader.tokenize is None:
        data.use_tokenizer_of(configuration.build("model"))


def _save(report: ProbeReport, options: ProbeOptions) -> None:
    report.save(options.folder)
    write_json(options.json, report.to_plain())
    assert options.plot is not None
    save_plot(options.plot, report.policies, report.buckets)
    print(f"Tables in {options.folder}, plot in {options.plot}.")
