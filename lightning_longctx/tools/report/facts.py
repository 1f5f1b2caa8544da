"""What a run comes to, in numbers: for the head of the page and for ``--json``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_longctx.tools.report.numbers import duration, short, whole
from lightning_longctx.tools.report.run import Run
from lightning_longctx.tools.report.series import Series
from lightning_longctx.units import counted

__all__ = ["Fact", "facts_of", "findings_of", "training_seconds"]


@dataclass(frozen=True)
class Fact:
    """One number.

    Attributes:
        key: in the JSON file.
        label: for people.
        value: the number, or a text.
        text: the value for people.
        note: what belongs to it.
    """

    key: str
    label: str
    value: float | int | str
    text: str
    note: str = ""


def facts_of(run: Run) -> list[Fact]:
    """All that is known; a fact that the run cannot give is left out."""
    return [*_progress(run), *_losses(run), *_speed(run), *_data(run), *_rest(run)]


def findings_of(run: Run) -> list[str]:
    """What should worry: a loss that is no number, as a sentence. Empty if nothing does."""
    found = []
    for key in ("train/loss", "val/loss"):
        bad = run.get(key).bad_steps
        if len(bad):
            found.append(
                f"{key} is no number at step {whole(int(bad[0]))} ({counted(len(bad), 'logged value')} in all)."
            )
    return found


def training_seconds(run: Run) -> float | None:
    """Seconds of training, without validation: from the tokens between two logged steps and their speed.

    The directory of a run holds no clock; times of files change with each copy.
    """
    tokens, speed = run.get("train/source_tokens").finite, run.get("train/tokens_per_s").finite
    shared, at, of = np.intersect1d(tokens.steps, speed.steps, return_indices=True)
    if not len(shared):
        return None
    rates = speed.values[of]
    passed = np.diff(tokens.values[at], prepend=0.0)
    if len(shared) > 1 and shared[0] > np.diff(shared).max():  # a run that was continued: its beginning is not here
        passed[0] = 0.0
    known = (rates > 0) & (passed > 0)
    with np.errstate(over="ignore"):
        return float((passed[known] / rates[known]).sum())


def _progress(run: Run) -> Iterator[Fact]:
    steps = max(
        (int(run.get(key).steps[-1]) + 1 for key in ("train/loss", "train/tokens_per_s") if len(run.get(key))),
        default=0,
    )
    if not steps:
        steps = max(int(series.steps[-1]) for series in run.series.values())
    planned = run.setting("trainer", "max_steps")
    known = isinstance(planned, int) and planned > 0
    note = f"of {whole(planned)}" + ("" if steps >= planned else ": under way, or stopped before") if known else ""
    yield Fact("steps", "Steps", steps, whole(steps), note)
    tokens, targets = run.get("train/source_tokens").finite, run.get("train/target_tokens").finite
    if len(tokens):
        note = f"{short(targets.last)} of them targets" if len(targets) else ""
        yield Fact("source_tokens", "Tokens", int(tokens.last), short(tokens.last), note)
    seconds = training_seconds(run)
    if seconds is not None:
        yield Fact("training_s", "Time of training", seconds, duration(seconds), "without validation")


def _losses(run: Run) -> Iterator[Fact]:
    train, validation = run.get("train/loss"), run.get("val/loss")
    if len(train):
        note = f"from {short(train.first)}" + (
            "" if math.isfinite(train.last) else f"; last number {short(train.finite.last)}"
        )
        note = note if len(train.finite) else "at no step a number"
        yield Fact("train_loss", "Training loss", train.last, short(train.last), note)
    if len(validation.finite):
        best = int(np.argmin(validation.finite.values))
        step = int(validation.finite.steps[best])
        lowest = float(validation.finite.values[best])
        note = f"lowest {short(lowest)} at step {whole(step)}"
        yield Fact("val_loss", "Validation loss", validation.last, short(validation.last), note)


def _speed(run: Run) -> Iterator[Fact]:
    speed, operations, use = (run.get(f"train/{name}").finite for name in ("tokens_per_s", "tflops_per_device", "mfu"))
    if len(speed):
        middle = _median(speed)
        note = f"median; {short(middle * 86_400)} a day" + (
            f"; {100 * _median(use):.1f} % of the peak" if len(use) else ""
        )
        yield Fact("tokens_per_s", "Tokens per second", middle, short(middle), note)
    if len(operations):
        middle = _median(operations)
        yield Fact("tflops_per_device", "TFLOP/s per device", middle, short(middle), "median")


def _data(run: Run) -> Iterator[Fact]:
    packed, padding, fill = (
        run.get(f"data/{name}").finite for name in ("tokens_packed", "tokens_padding", "source_fill")
    )
    if len(packed) and len(padding) and packed.last + padding.last > 0:
        share = packed.last / (packed.last + padding.last)
        note = f"{counted(padding.last, 'token')} of padding"
        yield Fact("source_fill", "Source fill", share, _percent(share), note)
    elif len(fill):
        mean = float(fill.values.mean())
        yield Fact("source_fill", "Source fill", mean, _percent(mean), "mean of the logged values")
    waits, longest_waits = run.get("data/wait_s_p50").finite, run.get("data/wait_s_p99").finite
    if len(waits) and len(longest_waits):
        middle, longest = _median(waits), float(longest_waits.values.max())
        note = f"median; longest 99th percentile {duration(longest)}"
        yield Fact("wait_s", "Wait for data", middle, duration(middle), note)


def _rest(run: Run) -> Iterator[Fact]:
    norms, memory = run.get("train/grad_norm").finite, run.get("train/memory_peak_gib").finite
    if len(norms):
        note = f"median; largest {short(float(norms.values.max()))}"
        yield Fact("grad_norm", "Gradient norm", _median(norms), short(_median(norms)), note)
    if len(memory):
        peak = float(memory.values.max())
        yield Fact("memory_peak_gib", "Peak memory", peak, f"{short(peak)} GiB", "of the device that uses most")
    stalls = run.under("checkpoint/stall_s/")
    if stalls:
        lost = sum(float(series.finite.values.sum()) for series in stalls.values())
        saves = len(np.unique(np.concatenate([series.steps for series in stalls.values()])))
        seconds = training_seconds(run)
        share = f"; {100 * lost / seconds:.2g} % of training" if seconds else ""
        yield Fact(
            "checkpoint_stall_s", "Waited for checkpoints", lost, duration(lost), f"{counted(saves, 'save')}{share}"
        )
    worst, dead = run.get("moe/max_vio").finite, run.get("moe/dead_experts").finite
    if len(worst):
        note = f"of the worst layer, last window; {counted(dead.last, 'expert')} without a token" if len(dead) else ""
        yield Fact("max_vio", "Busiest expert", worst.last, f"{worst.last + 1:.3g} x its share", note)


def _median(series: Series) -> float:
    return float(np.median(series.values)) if len(series) else math.nan


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def plain_number(value: Any) -> Any:
    """A value for JSON, which has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
