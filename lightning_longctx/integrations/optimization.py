"""Optimizer and learning-rate schedule as settings that YAML can fill, and the pure functions behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import TokenCount, parse_token_count

__all__ = [
    "OptimizerSettings",
    "ProgressSchedule",
    "ScheduleSettings",
    "build_optimizer",
    "keep_settings",
    "learning_rate_factor",
    "parameter_groups",
]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW.

    Args:
        lr: peak learning rate. Default 3e-4, usual for pretraining models of about 1B parameters.
        betas: decay of the two moments. Default (0.9, 0.95): with 0.999 a bad batch of a long run stays for thousands
            of steps.
        eps: default 1e-8, PyTorch's.
        weight_decay: on matrices only, never on biases and norms. Default 0.1, usual in language-model pretraining.
        implementation: ``fused`` (one kernel), ``foreach`` (few kernels, one temporary copy of the state), ``loop``
            (one tensor after another) or ``auto``: fused on CUDA, where a loop over thousands of sharded tensors is
            slow, but not under a gradient scaler, with which Lightning cannot clip a fused optimizer; PyTorch's default
            elsewhere.

    Raises:
        ConfigurationError: a value outside its range.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"

    def __post_init__(self) -> None:
        _check_choice("optimizer.implementation", self.implementation, ("auto", "fused", "foreach", "loop"))
        if not self.lr > 0:
            raise ConfigurationError("optimizer.lr", "must be positive", self.lr, "Give a rate such as 3e-4.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigurationError(
                "optimizer.betas", "must be two numbers in [0, 1)", self.betas, "Write [0.9, 0.95]."
            )
        if self.weight_decay < 0:
            raise ConfigurationError(
                "optimizer.weight_decay", "must be 0 or more", self.weight_decay, "Write 0.1 or 0."
            )


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning rate over the run: a linear warm-up from 0, then constant, linear or cosine decay to a floor.

    Progress is known on the host without asking the device, and is saved, so a resumed run continues it exactly.
    ``over: tokens`` counts the token budget of each step (``max_tokens_per_batch`` x data-parallel replicas x
    accumulated micro-batches), whatever part of it documents filled: warm-up and horizon then keep their meaning when
    the number of ranks or the batch changes, also in the middle of a run.

    Args:
        kind: shape after the warm-up. Default ``constant``: it needs no horizon.
        over: what progress is counted in.
        warmup_steps: length of the warm-up with ``over: steps``. Default 0: with AdamW and small models it is not
            needed.
        warmup_tokens: the same with ``over: tokens``.
        total_steps: where a decay ends, with ``over: steps``. Default: the trainer's ``max_steps``.
        total_tokens: the same with ``over: tokens``. Default: what a callback with a ``token_horizon`` says
            (``MaxTokens``), else ``max_steps`` times the tokens of a step.
        min_lr_ratio: floor of a decay, as a part of the peak. Default 0.1, usual in language-model pretraining.

    Raises:
        ConfigurationError: a value outside its range, or a length in the unit that is not counted.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    over: Literal["steps", "tokens"] = "steps"
    warmup_steps: int | None = None
    warmup_tokens: TokenCount | None = None
    total_steps: int | None = None
    total_tokens: TokenCount | None = None
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check_choice("schedule.kind", self.kind, ("constant", "linear", "cosine"))
        _check_choice("schedule.over", self.over, ("steps", "tokens"))
        for name in ("warmup_tokens", "total_tokens"):
            value = getattr(self, name)
            if value:
                object.__setattr__(self, name, parse_token_count(value, f"schedule.{name}"))
        other = "tokens" if self.over == "steps" else "steps"
        for name in (f"warmup_{other}", f"total_{other}"):
            if getattr(self, name) is not None:
                fix = f"Write `over: {other}`, or the length in {self.over}."
                raise ConfigurationError(
                    f"schedule.{name}", f"has no meaning with `over: {self.over}`", getattr(self, name), fix
                )
        if self.warmup < 0:
            raise ConfigurationError("schedule.warmup", "must be 0 or more", self.warmup, "Write 0 for none.")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigurationError("schedule.min_lr_ratio", "must be in [0, 1]", self.min_lr_ratio, "Write 0.1.")
        if self.total is not None:
            self.check_horizon(self.total)

    @property
    def warmup(self) -> int:
        """Length of the warm-up in the unit of ``over``."""
        return (self.warmup_steps if self.over == "steps" else self.warmup_tokens) or 0

    @property
    def total(self) -> int | None:
        """Where a decay ends, in the unit of ``over``, if it was given."""
        return self.total_steps if self.over == "steps" else self.total_tokens

    @property
    def is_flat(self) -> bool:
        """Whether the rate never changes."""
        return self.kind == "constant" and self.warmup == 0

    def end(self, max_steps: int, step_length: int, token_ends: Iterable[int] = ()) -> tuple[int | None, int | None]:
        """Where a decay ends: in the unit of ``over``, or else in steps. Neither for a constant rate.

        Args:
            max_steps: of the run; 0 or less if it has no number of them.
            step_length: what a step advances progress by.
            token_ends: where callbacks end the run, in tokens.

        Raises:
            ConfigurationError: a decay whose end nothing tells, or that ends before the warm-up does.
        """
        if self.kind == "constant":
            return None, None
        horizon = self.total
        if horizon is None and self.over == "tokens":
            horizon = min(token_ends, default=None)
        if horizon is None and max_steps <= 0:
            fix = f"Set `schedule.total_{self.over}` or `trainer.max_steps`, or write `schedule: {{kind: constant}}`."
            rule = f"must be known for a {self.kind} schedule"
            raise ConfigurationError(f"model.schedule.total_{self.over}", rule, "no end of the run", fix)
        self.check_horizon(max_steps * step_length if horizon is None else horizon)
        return horizon, max_steps if horizon is None else None

    def check_horizon(self, horizon: int) -> None:
        """Check that a decay has room after the warm-up.

        Args:
            horizon: where it ends, in the unit of ``over``.

        Raises:
            ConfigurationError: it ends before the warm-up does.
        """
        if self.kind != "constant" and horizon <= self.warmup:
            got = f"an end at {horizon:,} and a warm-up of {self.warmup:,} {self.over}"
            fix = f"Shorten `warmup_{self.over}` or raise `total_{self.over}` or `trainer.max_steps`."
            raise ConfigurationError(f"schedule.total_{self.over}", "must lie after the warm-up", got, fix)


class ProgressSchedule(LRScheduler):
    """Learning rate by progress, which each step advances by what it holds at that time.

    Its state is the progress itself and not a number of steps, so a run that goes on with other ranks, another batch or
    another accumulation finds the rate that belongs to the tokens it has behind it. The settings, horizon and length of
    a step are those of the present run.

    Args:
        optimizer: whose rates are set; those it has are the peaks.
        settings: the schedule.
        step_length: what a step advances progress by, asked at each step: 1, or its tokens.
        horizon: where a decay ends, in the unit of progress; None where ``max_steps`` tells.
        max_steps: where the run ends, in steps; what is left of them, at the present length, is the way to the end.

    Example:
        >>> optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> settings = ScheduleSettings(kind="linear", over="tokens", min_lr_ratio=0.0)
        >>> schedule = ProgressSchedule(optimizer, settings, lambda: 100, horizon=400)
        >>> optimizer.step(); schedule.step()
        >>> optimizer.param_groups[0]["lr"]
        0.75
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: ScheduleSettings,
        step_length: Callable[[], int],
        horizon: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        self._settings = settings
        self._step_length = step_length
        self._horizon = horizon
        self._max_steps = max_steps
        self.done = 0
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step. The base class calls it once when it is made, for the first rate."""
        if self.last_epoch >= 0:
            self.done += self._step_length()
        super().step()

    def get_lr(self) -> list[Any]:
        """Rates of the step to come."""
        length, horizon = self._step_length(), self._horizon
        if horizon is None and self._max_steps is not None:
            horizon = self.done + max(0, self._max_steps - self.last_epoch) * length
        factor = learning_rate_factor(self._settings, self.done, length, horizon)
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Progress and number of steps."""
        return {"done": self.done, "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a progress. The rate of the next step is that of the present settings there, peak included."""
        self.done, self.last_epoch = state_dict["done"], state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def learning_rate_factor(settings: ScheduleSettings, done: int, step_length: int, horizon: int | None) -> float:
    """Return the learning rate of a step as a part of the peak.

    Args:
        settings: the schedule.
        done: progress before this step.
        step_length: what the step advances it by: 1, or its tokens.
        horizon: where the decay ends, in the unit of progress. Not used by ``constant``.

    Returns:
        A factor in [0, 1]. The first step of a warm-up is not 0, which would waste it.

    Example:
        >>> learning_rate_factor(ScheduleSettings(kind="linear", warmup_steps=2, min_lr_ratio=0.0), 6, 1, 10)
        0.5
    """
    if done < settings.warmup:
        return min(1.0, (done + step_length) / settings.warmup)
    if settings.kind == "constant":
        return 1.0
    assert horizon is not None
    part = min(1.0, (done - settings.warmup) / (horizon - settings.warmup))
    shape = 1.0 - part if settings.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * shape


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into decayed matrices and the rest (biases, norms and whatever else has one dimension).

    Args:
        named: names and parameters; those without gradient are left out.
        weight_decay: of the first group.

    Returns:
        Groups for a PyTorch optimizer, without empty ones.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            (others if parameter.ndim < 2 or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings, has_scaler: bool = False
) -> torch.optim.AdamW:
    """Build AdamW over a module's parameters.

    Args:
        named: names and parameters.
        settings: the optimizer's settings.
        has_scaler: whether gradients are scaled for fp16.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: nothing to train.
    """
    groups = parameter_groups(named, settings.weight_decay)
    if not groups:
        raise ConfigurationError("model", "must have a parameter that requires a gradient", "none", "Unfreeze some.")
    kind = settings.implementation
    if kind == "auto" and not has_scaler and all(p.is_cuda for group in groups for p in group["params"]):
        kind = "fused"
    choice = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}.get(kind, {})
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **choice)


def keep_settings(optimizer: torch.optim.Optimizer, tell: Callable[[str], object]) -> None:
    """Let the settings that an optimizer has now outlive its resume: PyTorch would put back those of the checkpoint.

    Args:
        optimizer: as it was built, before a schedule changes its rates.
        tell: hears once what differs.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        changes = []
        for group, mine in zip(optimizer.param_groups, own, strict=True):
            saved = {**group, "lr": group.get("initial_lr", group["lr"])}
            changes += [
                f"{key} is {mine[key]} instead of {saved[key]}"
                for key in ("lr", "betas", "eps", "weight_decay")
                if key in saved and not _equal(saved[key], mine[key])
            ]
            group.update(mine)
            if "initial_lr" in group:
                group["initial_lr"] = mine["lr"]
        if changes:
            tell(f"Optimizer resumed with changes that apply from here on: {'; '.join(dict.fromkeys(changes))}.")

    optimizer.register_load_state_dict_post_hook(put_back)


def _equal(saved: Any, mine: Any) -> bool:
    """Whether two settings are the same; a pair may have become a list on its way."""
    return (tuple(saved) if isinstance(saved, list) else saved) == (tuple(mine) if isinstance(mine, list) else mine)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(field, f"must be one of {', '.join(choices)}", repr(value), "Correct the name.")
