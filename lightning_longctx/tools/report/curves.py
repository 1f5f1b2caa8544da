"""Which keys make which chart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_longctx.tools.report.charts import COLOURS, Line, chart
from lightning_longctx.tools.report.groups import group_of
from lightning_longctx.tools.report.html import Markup
from lightning_longctx.tools.report.run import Run
from lightning_longctx.tools.report.series import Series

__all__ = ["CHARTS", "other_charts", "standard_charts"]


@dataclass(frozen=True)
class ChartSpec:
    """A chart of known keys.

    Attributes:
        title: what it shows.
        note: unit, and what a value is over.
        keys: key, and its name in the legend. A key that ends in ``/`` stands for all keys that start so.
        percent: values are shares.
        wide: over the whole width.
        dots: dots, for what happens now and then.
    """

    title: str
    note: str
    keys: tuple[tuple[str, str], ...]
    percent: bool = False
    wide: bool = False
    dots: bool = False


_LOSS_NOTE = "natural logarithm per token"
_MIX = (("data/mix/", ""),)
#: By section, in the order of the page.
CHARTS = {
    "Loss": (
        ChartSpec("Loss", _LOSS_NOTE, (("train/loss", "training"), ("val/loss", "validation")), wide=True),
        ChartSpec("Learning rate", "of the first parameter group", (("train/lr", "learning rate"),)),
        ChartSpec("Gradient norm", "before clipping", (("train/grad_norm", "gradient norm"),)),
    ),
    "Experts": (
        ChartSpec(
            "Tokens of the busiest expert",
            "above a fair share, in shares",
            (("moe/max_vio", "worst layer"), ("moe/max_vio_mean", "mean of layers")),
        ),
        ChartSpec(
            "Experts without a token",
            "in a window",
            (("moe/dead_experts", "worst layer"), ("moe/dead_experts_mean", "mean of layers")),
        ),
        ChartSpec(
            "Entropy of the shares",
            "1 is fair, 0 is one expert",
            (("moe/entropy", "worst layer"), ("moe/entropy_mean", "mean of layers")),
        ),
        ChartSpec(
            "Choices not counted",
            "padding, and beyond an expert's capacity",
            (("moe/padding_share", "padding"), ("moe/dropped_share", "dropped")),
            percent=True,
        ),
    ),
    "Data": (
        ChartSpec("Source fill", "source tokens of the token budget", (("data/source_fill", "fill"),), percent=True),
        ChartSpec(
            "Wait for data",
            "seconds a micro-batch, of the rank that waits most",
            (("data/wait_s_p50", "median"), ("data/wait_s_p99", "99th percentile")),
        ),
        ChartSpec("Mix", "share of each source in the tokens packed so far", _MIX, percent=True),
    ),
    "Speed": (
        ChartSpec("Tokens per second", "source tokens, all devices", (("train/tokens_per_s", "tokens per second"),)),
        ChartSpec(
            "Operations", "TFLOP/s per device, of the model's mathematics", (("train/tflops_per_device", "TFLOP/s"),)
        ),
        ChartSpec("Utilization", "of the device's peak", (("train/mfu", "utilization"),), percent=True),
        ChartSpec(
            "Peak memory", "GiB, of the device that uses most, so far", (("train/memory_peak_gib", "peak memory"),)
        ),
    ),
    "Checkpoints": (
        ChartSpec("Training waited", "seconds for each save", (("checkpoint/stall_s/", ""),), dots=True),
        ChartSpec(
            "Writing", "seconds from the start of a save, behind training", (("checkpoint/write_s/", ""),), dots=True
        ),
    ),
}

#: What the parts of this suite log and no chart above draws: shown in tables, part of other numbers, or of each layer.
_ELSEWHERE = re.compile(
    r"(data|offload)/.*|checkpoint/(bytes|pending_age_s)/.*|train/(source_tokens|target_tokens|tokens_per_s_per_device)"
    r"|moe/(max_vio|min_vio|avg_vio|variation|entropy|dead_experts|tokens_max|tokens_min)(_mean|/layer_\d+)?"
)
_MOST_OTHERS = 40


def standard_charts(section: str, runs: Sequence[Run]) -> Iterator[Markup]:
    """The charts of a section that any run has values for."""
    for spec in CHARTS[section]:
        lines = [
            line for number, run in enumerate(runs) for line in _lines(spec, run, number if len(runs) > 1 else None)
        ]
        drawn = chart(spec.title, spec.note, lines, spec.percent, spec.wide)
        if drawn is not None:
            yield drawn


def other_charts(runs: Sequence[Run], known: Sequence[str]) -> tuple[list[Markup], int]:
    """Charts of keys that are nobody's here: what the user's own code logs.

    Args:
        runs: to draw.
        known: beginnings of further keys that are shown elsewhere.

    Returns:
        At most 40 charts, and how many keys are not shown.
    """
    drawn_above = [key for specs in CHARTS.values() for spec in specs for key, _ in spec.keys]
    begun = (*known, *(key for key in drawn_above if key.endswith("/")))
    keys = dict.fromkeys(
        key
        for run in runs
        for key in run.series
        if not (key in drawn_above or key.startswith(begun) or _ELSEWHERE.fullmatch(key))
    )
    drawn = []
    for key in list(keys)[:_MOST_OTHERS]:
        lines = [Line(run.name if len(runs) > 1 else key, run.get(key), number) for number, run in enumerate(runs)]
        drawn.append(chart(key, "", lines))
    return [one for one in drawn if one is not None], max(0, len(keys) - _MOST_OTHERS)


def _lines(spec: ChartSpec, run: Run, number: int | None) -> Iterator[Line]:
    """Lines of one run: by colour where it is alone, else of the run's colour and told apart by dashes."""
    found: list[tuple[str, Series]] = []
    for key, name in spec.keys:
        found += run.under(key).items() if key.endswith("/") else [(name, run.get(key))]
    members = group_of(run, "channel").members if spec.keys == _MIX else ()
    places = {member.name: place for place, member in enumerate(members)}  # a source has its colour in every chart
    drawn = [(name, series) for name, series in found if len(series)]
    for name, series in sorted(drawn, key=lambda pair: places.get(pair[0], len(places))):
        place = places.setdefault(name, len(places))
        if number is None:
            yield Line(name, series, min(place, COLOURS), dots=spec.dots)
        else:
            label = run.name if len(found) == 1 else f"{run.name}, {name}"
            yield Line(label, series, number, dashed=place > 0, dots=spec.dots)
