"""The parts of the page: what it says of each topic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_longctx.tools.output import human_bytes
from lightning_longctx.tools.report.charts import COLOURS, Line, chart, sparkline
from lightning_longctx.tools.report.curves import other_charts, standard_charts
from lightning_longctx.tools.report.facts import facts_of, findings_of
from lightning_longctx.tools.report.groups import Group, group_of, groups_of
from lightning_longctx.tools.report.heatmaps import load_by_window, load_over_time
from lightning_longctx.tools.report.html import Markup, join, tag
from lightning_longctx.tools.report.kept import kept_checkpoints
from lightning_longctx.tools.report.missing import missing_parts
from lightning_longctx.tools.report.numbers import duration, short, whole
from lightning_longctx.tools.report.run import Run
from lightning_longctx.units import counted

__all__ = ["sections_of"]

_LONG = 16  # rows from which a table scrolls
_SOURCE_CHARTS = 6  # where runs are compared: one chart a source


def sections_of(runs: Sequence[Run]) -> list[tuple[str, Markup]]:
    """Titles and contents, in the order of the page; empty parts are left out."""
    prefixes = groups_of(runs)
    found: list[tuple[str, Markup | None]] = [("Overview", _overview(runs))]
    found.append(("Loss", _figures(standard_charts("Loss", runs))))
    for prefix in prefixes:
        groups = [group_of(run, prefix) for run in runs]
        title = next(group.title for group in groups)
        found.append((title, _by_source(runs, groups)))
    found.append(("Experts", _experts(runs)))
    found.append(
        ("Data", join(_figures(standard_charts("Data", runs)), _counters(runs, "data/", "What was read and packed")))
    )
    offload = _counters(runs, "offload/", "Activation offload")
    found.append(("Speed", join(_figures(standard_charts("Speed", runs)), offload)))
    found.append(("Checkpoints", join(_figures(standard_charts("Checkpoints", runs)), _saves(runs), *map(_kept, runs))))
    found.append(("Other metrics", _others(runs, prefixes)))
    found.append(("Configuration", _configuration(runs)))
    found.append(("What else a run can show", _missing(runs)))
    return [(title, content) for title, content in found if content]


def _overview(runs: Sequence[Run]) -> Markup:
    warned = [
        tag("p", f"{run.name}: {text}" if len(runs) > 1 else text, class_="finding")
        for run in runs
        for text in findings_of(run)
    ]
    if len(runs) == 1:
        tiles = [
            tag("div", tag("dt", fact.label), tag("dd", fact.text, tag("small", fact.note) if fact.note else None))
            for fact in facts_of(runs[0])
        ]
        return join(*warned, tag("dl", *tiles, class_="tiles"))
    facts = [{fact.key: fact for fact in facts_of(run)} for run in runs]
    labels = {fact.key: fact.label for of_run in facts for fact in of_run.values()}
    rows = [
        [label, *(join(of_run[key].text, _small(of_run[key].note)) if key in of_run else "-" for of_run in facts)]
        for key, label in labels.items()
    ]
    head = ["", *(join(tag("i", class_=f"key c{min(n, COLOURS)}"), run.name) for n, run in enumerate(runs))]
    return join(*warned, _table(head, rows))


def _by_source(runs: Sequence[Run], groups: Sequence[Group]) -> Markup | None:
    if len(runs) > 1:
        return _sources_of_runs(runs, groups)
    (group,) = groups
    lines = [Line(member.name, member.loss, place) for place, member in enumerate(group.members)]
    return join(
        _figures([chart("Training", "natural logarithm per token", lines, wide=True)]),
        _source_table(group, runs[0].under("data/mix/") if group.prefix == "channel" else {}),
    )


def _source_table(group: Group, mix: Mapping[str, Any]) -> Markup:
    known = [
        (place, member)
        for place, member in enumerate(group.members)
        if len(member.loss.finite) or len(member.validation.finite)
    ]
    total = sum(member.targets for _, member in known)
    validated = any(len(member.validation) for _, member in known)
    head = ["", "curve", "first", "last", "change", *(["validation"] if validated else [])]
    head += [*(["share of targets"] if total else []), *(["share of the mix"] if mix else [])]
    if not known:
        return Markup("")
    trained = [member.loss.steps for _, member in known if len(member.loss)]
    across = min((int(steps[0]) for steps in trained), default=0), max((int(steps[-1]) for steps in trained), default=0)
    rows: list[list[str]] = []
    for place, member in known:
        loss = member.loss.finite
        row = [
            join(tag("i", class_=f"key c{min(place, COLOURS)}"), member.name),
            sparkline(loss, min(place, COLOURS), across),
            *([f"{loss.first:.3f}", f"{loss.last:.3f}", f"{loss.last - loss.first:+.3f}"] if len(loss) else ["-"] * 3),
        ]
        row += [f"{member.validation.last:.3f}" if len(member.validation) else "-"] if validated else []
        row += [f"{member.targets / total:.1%}"] if total else []
        row += [f"{mix[member.name].last:.1%}" if member.name in mix else "-"] if mix else []
        rows.append(row)
    return _table(head, rows)


def _sources_of_runs(runs: Sequence[Run], groups: Sequence[Group]) -> Markup:
    """A chart for each of the largest sources, and a table of the last losses of all."""
    names = dict.fromkeys(member.name for group in groups for member in group.members)
    members = [{member.name: member for member in group.members} for group in groups]
    charts = []
    for name in list(names)[:_SOURCE_CHARTS]:
        lines = [
            Line(run.name, of_run[name].loss, number)
            for number, (run, of_run) in enumerate(zip(runs, members, strict=True))
            if name in of_run
        ]
        charts.append(chart(name, "natural logarithm per token", lines))
    rows = []
    for name in names:
        last = [of_run[name].loss.finite.last if name in of_run else math.nan for of_run in members]
        cells = [f"{value:.3f}" if math.isfinite(value) else "-" for value in last]
        changes = [_small(f"{value - last[0]:+.3f}") if math.isfinite(value - last[0]) else None for value in last[1:]]
        rows.append([name, cells[0], *(join(cell, change) for cell, change in zip(cells[1:], changes, strict=True))])
    return join(_figures(charts), _table(["last loss", *(run.name for run in runs)], rows))


def _experts(runs: Sequence[Run]) -> Markup | None:
    drawn: list[Markup | None] = []
    for run in runs:
        name = run.name if len(runs) > 1 else ""
        if run.experts is not None:
            drawn.append(load_by_window(run.experts, name))
            if len(run.experts.windows) > 1:
                drawn += [load_over_time(run.experts, busiest, name) for busiest in (True, False)]
    return _figures([*drawn, *standard_charts("Experts", runs)])


def _counters(runs: Sequence[Run], prefix: str, title: str) -> Markup | None:
    """The last values of counters, without those that are drawn."""
    drawn = ("source_fill", "wait_s", "mix/")
    found = [{key: one.last for key, one in run.under(prefix).items() if not key.startswith(drawn)} for run in runs]
    keys = dict.fromkeys(key for values in found for key, value in values.items() if value)
    if not keys:
        return None
    rows = [
        [key.replace("_", " "), *(short(of_run[key]) if key in of_run else "-" for of_run in found)] for key in keys
    ]
    silent = any(not value for values in found for value in values.values())
    note = tag("p", "Counters that are zero are not listed.", class_="note") if silent else None
    return join(tag("h3", title), _table(["", *_heads(runs, "so far")], rows), note)


def _saves(runs: Sequence[Run]) -> Markup | None:
    rows = []
    for run in runs:
        for slot, waits in run.under("checkpoint/stall_s/").items():
            writes = run.get(f"checkpoint/write_s/{slot}").finite
            written = run.get(f"checkpoint/bytes/{slot}").finite
            seconds = waits.finite.values
            rows.append(
                [
                    *([run.name] if len(runs) > 1 else []),
                    slot,
                    whole(len(waits)),
                    duration(float(seconds.sum())),
                    duration(float(seconds.max())) if len(seconds) else "-",
                    duration(float(writes.values.max())) if len(writes) else "-",
                    human_bytes(written.last) if len(written) else "-",
                ]
            )
    if not rows:
        return None
    head = [
        *(["run"] if len(runs) > 1 else []),
        "slot",
        "saves",
        "training waited",
        "longest wait",
        "longest write",
        "last size",
    ]
    note = tag("p", "Size: what the first rank wrote.", class_="note")
    return join(_table(head, rows), note)


def _kept(run: Run) -> Markup | None:
    found = kept_checkpoints(run)
    if found is None:
        return None
    title, head, rows = found
    return join(tag("h3", title), _table(head, rows))


def _others(runs: Sequence[Run], prefixes: Sequence[str]) -> Markup | None:
    kinds = ("loss", "loss_weighted", "tokens", "samples", "input_tokens", "label_tokens")
    known = [f"{stage}{prefix}_{kind}/" for stage in ("", "val_", "test_") for prefix in prefixes for kind in kinds]
    drawn, left = other_charts(runs, known)
    if not drawn:
        return None
    note = tag("p", f"{counted(left, 'further key')} in the logger's files.", class_="note") if left else None
    return join(_figures(drawn), note)


def _configuration(runs: Sequence[Run]) -> Markup | None:
    parts: list[Markup | None] = [_versions(runs), _differences(runs) if len(runs) > 1 else None]
    for run in runs:
        if run.configuration_text:
            title = f"Configuration of {run.name}" if len(runs) > 1 else "The whole configuration"
            parts.append(tag("details", tag("summary", title), tag("pre", run.configuration_text)))
    return join(*parts)


def _versions(runs: Sequence[Run]) -> Markup | None:
    names = dict.fromkeys(name for run in runs for name in run.versions)
    rows = [[name, *(run.versions.get(name, "-") for run in runs)] for name in names]
    return _table(["", *_heads(runs, "version")], rows) if rows else None


def _differences(runs: Sequence[Run]) -> Markup | None:
    """What differs between the runs whose configuration is known."""
    known = [run for run in runs if run.configuration]
    if len(known) < 2:
        return None
    flat = [dict(_flattened(run.configuration)) for run in known]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [
        [key, *(settings.get(key, "-") for settings in flat)]
        for key in keys
        if len({settings.get(key) for settings in flat}) > 1
    ]
    if not rows:
        which = "The runs" if len(known) == len(runs) else " and ".join(run.name for run in known)
        return tag("p", f"{which} have the same configuration.")
    return join(tag("h3", "Settings that differ"), _table(["", *(run.name for run in known)], rows))


def _flattened(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            inner = place if key == "init_args" else f"{place}.{key}" if place else str(key)
            yield from _flattened(part, inner)
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        for number, part in enumerate(value):
            yield from _flattened(part, f"{place}[{number}]")
    else:
        yield place, str(value)


def _missing(runs: Sequence[Run]) -> Markup | None:
    parts = missing_parts(runs)
    return tag("ul", *(tag("li", *_with_code(text)) for text in parts)) if parts else None


def _with_code(text: str) -> list[str]:
    """Words between backticks as code."""
    return [tag("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))]


def _figures(drawn: Any) -> Markup | None:
    found = [one for one in drawn if one is not None]
    return tag("div", *found, class_="figures") if found else None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head)))
    kind = "scroll long" if len(rows) > _LONG else "scroll"
    return tag("div", tag("table", top, tag("tbody", *body)), class_=kind, tabindex="0")


def _heads(runs: Sequence[Run], alone: str) -> list[str]:
    """Names of columns: of the runs, or what the one column is."""
    return [run.name for run in runs] if len(runs) > 1 else [alone]


def _small(text: str) -> Markup | None:
    return tag("small", text) if text else None
