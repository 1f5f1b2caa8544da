"""Checks of how long a run is: where it ends, and whether what is to happen on the way happens before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.check.report import Check, Skipped
from lightning_longctx.tools.check.subject import Subject
from lightning_longctx.units import counted

__all__ = ["Length", "check_learning_rate", "check_length", "length_of"]

# What Lightning makes of a run without an end.
_LIGHTNINGS_EPOCHS = 1000


@dataclass(frozen=True)
class Length:
    """Where a run ends.

    Attributes:
        max_steps: ``trainer.max_steps``, if it is set.
        tokens: the smaller limit of ``MaxTokens``, if it is there.
        step_tokens: token budget of a step over all ranks; None while devices or data are not known.
        accumulate: micro-batches of a step; None where ``global_batch_tokens`` sets them and devices are not known.
    """

    max_steps: int | None
    tokens: int | None
    step_tokens: int | None
    accumulate: int | None

    @property
    def steps(self) -> int | None:
        """The number of steps with full rows, if anything tells it."""
        by_tokens = -(-self.tokens // self.step_tokens) if self.tokens and self.step_tokens else None
        return min((steps for steps in (self.max_steps, by_tokens) if steps is not None), default=None)

    @property
    def all_tokens(self) -> int | None:
        """The token budget of the whole run, if anything tells it."""
        by_steps = self.max_steps * self.step_tokens if self.max_steps and self.step_tokens else None
        return min((tokens for tokens in (self.tokens, by_steps) if tokens is not None), default=None)


def length_of(subject: Subject) -> Length:
    """Where the run that is checked ends."""
    steps = int(subject.trainer.get("max_steps") or -1)
    limits = subject.callback("MaxTokens") or {}
    tokens = [int(limits[name]) for name in ("source", "target") if limits.get(name)]
    return Length(steps if steps > 0 else None, min(tokens, default=None), *_step(subject))


def _step(subject: Subject) -> tuple[int | None, int | None]:
    """Tokens and micro-batches of a step."""
    given = subject.part_settings("data").get("global_batch_tokens")
    own = int(subject.trainer.get("accumulate_grad_batches") or 1)
    try:
        budget = getattr(subject.build("data"), "max_tokens_per_batch", None)
        rows = subject.data_parallel_ranks
    except Skipped:
        budget = rows = None
    if budget is None or rows is None:
        return (int(given), None) if given else (None, own)
    return (int(given), int(given) // (int(budget) * rows)) if given else (int(budget) * rows * own, own)


def check_length(subject: Subject) -> Check:
    """Where the run ends, and whether it saves, logs and validates before."""
    _check_monitors(subject)
    length = length_of(subject)
    ends = [counted(length.max_steps, "step")] if length.max_steps else []
    ends += [f"{counted(length.tokens, 'token')} (MaxTokens)"] if length.tokens else []
    ends += [f"{name} {value}" for name in ("max_epochs", "max_time") if (value := _end(subject, name))]
    each = f", {counted(length.step_tokens, 'token')} a step" if length.step_tokens else ""
    text = f"ends after {' or '.join(ends)}{each}" if ends else f"no end is set{each}"
    facts = {"steps": length.steps, "step_tokens": length.step_tokens}
    odd = [*_odd_ends(length, ends), *_odd_saves(subject, length), *_odd_intervals(subject, length)]
    return Check("length", "warning" if odd else "fine", "; ".join([text, *odd]), facts)


def _end(subject: Subject, name: str) -> Any:
    value = subject.trainer.get(name)
    return None if value in (None, -1) else value


def _odd_ends(length: Length, ends: list[str]) -> Iterator[str]:
    if not ends:
        yield f"Lightning makes {counted(_LIGHTNINGS_EPOCHS, 'epoch')}: set `trainer.max_steps` or add MaxTokens"
    if length.tokens and length.step_tokens and length.tokens < length.step_tokens:
        yield "MaxTokens ends it within the first step"


def _odd_saves(subject: Subject, length: Length) -> Iterator[str]:
    settings, own = subject.callback("AsyncDCPCheckpoint"), subject.callback("ModelCheckpoint")
    if settings is None and own is None:
        if subject.trainer.get("enable_checkpointing") is False:
            yield "nothing is saved (`enable_checkpointing: false`)"
        else:
            yield "nothing is saved before an epoch is over: add AsyncDCPCheckpoint"
    every = (settings or {}).get("every_n_train_steps")
    if every and length.steps and every > length.steps:
        yield f"`every_n_train_steps: {every}` saves its end alone"


def _odd_intervals(subject: Subject, length: Length) -> Iterator[str]:
    if not length.steps:
        return
    every = int(subject.trainer.get("log_every_n_steps") or 50)  # Lightning's default
    if every > length.steps:
        yield f"`trainer.log_every_n_steps: {every}` logs nothing"
    interval = subject.trainer.get("val_check_interval")
    batches = None if length.accumulate is None else length.steps * length.accumulate
    if isinstance(interval, int) and batches is not None and interval > batches and _validates(subject):
        yield f"`trainer.val_check_interval: {interval}` validates never"


def _check_monitors(subject: Subject) -> None:
    """Refuse callbacks that wait for a metric of a validation which there is not."""
    if _validates(subject):
        return
    for name, settings in subject.callbacks():
        monitor = settings.get("monitor")
        if isinstance(monitor, str) and monitor.startswith("val"):
            fix = "Set `data.validation_sources`, or monitor a metric of training such as train/loss."
            got = f"{monitor!r} without `data.validation_sources`"
            raise ConfigurationError(f"callbacks.{name}.monitor", "must be a metric that is logged", got, fix)


def _validates(subject: Subject) -> bool:
    """Whether a fit validates, as far as it is known: other data modules may bring what they like."""
    settings = subject.part_settings("data")
    return "validation_sources" not in settings or settings["validation_sources"] is not None


def check_learning_rate(subject: Subject) -> Check:
    """Whether warm-up and decay of the learning rate fit into the run."""
    settings = getattr(subject.build("model"), "schedule_settings", None)
    if settings is None:
        raise Skipped("the schedule of this model is not known here")
    length = length_of(subject)
    step, end = (1, length.steps) if settings.over == "steps" else (length.step_tokens, length.all_tokens)
    if step is None:
        raise Skipped("the tokens of a step are not known: give --devices 8")
    settings.end(length.max_steps or -1, step, [length.tokens] if length.tokens else [])
    unit = "step" if settings.over == "steps" else "token"
    text = f"{settings.kind}, warm-up of {counted(settings.warmup, unit)}" if settings.warmup else settings.kind
    odd = []
    if end is not None and settings.warmup >= end:
        odd.append(f"the run of {counted(end, unit)} ends before the warm-up: the rate never reaches its peak")
    if end is not None and settings.kind != "constant" and settings.total is not None:
        text += f", decay until {settings.total:,}"
        if settings.total + step <= end:
            odd.append(f"the run goes on to {counted(end, unit)}, at the lowest rate")
        elif settings.total >= end + step:
            odd.append(f"the run ends at {counted(end, unit)}, before the lowest rate")
    return Check("learning rate", "warning" if odd else "fine", "; ".join([text, *odd]))
