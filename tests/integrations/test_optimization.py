"""Settings, groups and the learning rate as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.optimization import (
    OptimizerSettings,
    ProgressSchedule,
    ScheduleSettings,
    build_optimizer,
    keep_settings,
    learning_rate_factor,
    parameter_groups,
)


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("constant", 0, 0.25),
        ("constant", 2, 0.75),
        ("constant", 3, 1.0),
        ("constant", 4, 1.0),
        ("constant", 10_000, 1.0),
        ("linear", 4, 1.0),
        ("linear", 8, 0.55),
        ("linear", 12, 0.1),
        ("linear", 99, 0.1),
        ("cosine", 4, 1.0),
        ("cosine", 6, 0.1 + 0.9 * 0.85355339),
        ("cosine", 8, 0.55),
        ("cosine", 12, 0.1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 1000])
def test_factor(kind: Any, step: int, expected: float, tokens: int) -> None:
    unit = "steps" if tokens == 1 else "tokens"
    settings = ScheduleSettings(kind=kind, over=unit, **{f"warmup_{unit}": 4 * tokens})
    horizon = None if kind == "constant" else 12 * tokens
    assert learning_rate_factor(settings, step * tokens, tokens, horizon) == pytest.approx(expected)


def _schedule(length: list[int], **end: int) -> tuple[torch.optim.Optimizer, ProgressSchedule]:
    """A linear decay over tokens; ``length`` holds the present length of a step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    settings = ScheduleSettings(kind="linear", over="tokens", warmup_tokens=200, min_lr_ratio=0.0)
    return optimizer, ProgressSchedule(optimizer, settings, lambda: length[0], **end)


def _rates(optimizer: torch.optim.Optimizer, schedule: ProgressSchedule, steps: int) -> list[float]:
    """Rates that the next steps use."""
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def test_rates_follow_the_tokens_when_steps_change_their_length() -> None:
    length = [100]
    optimizer, schedule = _schedule(length, horizon=1000)
    assert _rates(optimizer, schedule, 4) == pytest.approx([1.0, 2.0, 2.0, 2 * 700 / 800])
    length[0] = 200  # more accumulation from the next epoch on: 500 are done with the step that is set already
    assert _rates(optimizer, schedule, 3) == pytest.approx([2 * 600 / 800, 2 * 400 / 800, 2 * 200 / 800])


@pytest.mark.parametrize("end", [{"horizon": 1000}, {"max_steps": 10}], ids=str)
def test_a_resume_goes_on_at_the_tokens_that_are_done(end: dict[str, int]) -> None:
    optimizer, schedule = _schedule([100], **end)
    _rates(optimizer, schedule, 5)
    state, optimizer_state = schedule.state_dict(), optimizer.state_dict()
    assert state == {"done": 500, "last_epoch": 5}
    same, whole = _schedule([100], **end), _rates(optimizer, schedule, 5)
    same[0].load_state_dict(optimizer_state)
    same[1].load_state_dict(state)
    assert _rates(*same, 5) == whole == pytest.approx([2 * left / 800 for left in (500, 400, 300, 200, 100)])


def test_a_resume_with_half_the_ranks_has_the_rate_of_its_tokens() -> None:
    optimizer, schedule = _schedule([100], horizon=1000)
    _rates(optimizer, schedule, 5)
    half, halved = _schedule([50], horizon=1000)
    half.load_state_dict(optimizer.state_dict())
    halved.load_state_dict(schedule.state_dict())
    assert _rates(half, halved, 10) == pytest.approx([2 * left / 800 for left in range(500, 0, -50)])


def test_a_resume_with_other_ranks_still_ends_with_its_steps() -> None:
    optimizer, schedule = _schedule([100], max_steps=10)
    _rates(optimizer, schedule, 5)
    half, halved = _schedule([50], max_steps=10)
    half.load_state_dict(optimizer.state_dict())
    halved.load_state_dict(schedule.state_dict())
    _rates(half, halved, 5)
    assert half.param_groups[0]["lr"] == 0.0
    assert halved.done == 750


@pytest.mark.parametrize("has_schedule", [False, True])
def test_the_settings_of_the_present_run_outlive_a_resume(has_schedule: bool) -> None:
    told: list[str] = []

    def build(**settings: Any) -> tuple[torch.optim.Optimizer, ProgressSchedule | None]:
        named = [("weight", nn.Parameter(torch.ones(2, 2))), ("bias", nn.Parameter(torch.ones(2)))]
        optimizer = build_optimizer(named, OptimizerSettings(implementation="loop", **settings))
        keep_settings(optimizer, told.append)
        shape = ScheduleSettings(kind="linear", min_lr_ratio=0.0)
        return optimizer, ProgressSchedule(optimizer, shape, lambda: 1, horizon=10) if has_schedule else None

    optimizer, schedule = build(lr=1.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if schedule is not None:
        schedule.step()
    for settings, lr in (({"lr": 1.0}, 1.0), ({"lr": 0.5, "weight_decay": 0.3, "betas": (0.8, 0.9)}, 0.5)):
        other, its_schedule = build(**settings)
        other.load_state_dict(optimizer.state_dict())
        if schedule is not None and its_schedule is not None:
            its_schedule.load_state_dict(schedule.state_dict())
        assert [group["lr"] for group in other.param_groups] == [lr * (0.9 if has_schedule else 1)] * 2
        assert [group["weight_decay"] for group in other.param_groups] == [settings.get("weight_decay", 0.1), 0.0]
        assert {group["betas"] for group in other.param_groups} == {settings.get("betas", (0.9, 0.95))}
        assert other.state_dict()["state"][0]["exp_avg"].any(), "the moments are those of the checkpoint"
    (line,) = told
    for change in ("lr is 0.5 instead of 1.0", "betas is (0.8, 0.9) instead of (0.9, 0.95)", "weight_decay is 0.3"):
        assert change in line
    assert line.count("lr is") == 1


def test_a_rate_may_be_a_tensor() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(2.0))
    settings = ScheduleSettings(kind="linear", min_lr_ratio=0.0)
    schedule = ProgressSchedule(optimizer, settings, lambda: 1, max_steps=4)
    _rates(optimizer, schedule, 1)
    rate = optimizer.param_groups[0]["lr"]
    assert rate.item() == 1.5
    schedule.load_state_dict({"done": 3, "last_epoch": 3})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_warmup_shorter_than_a_step_is_no_warmup() -> None:
    settings = ScheduleSettings(over="tokens", warmup_tokens=100)
    assert [learning_rate_factor(settings, done, 4096, None) for done in (0, 4096)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"warmup_tokens": 5}, "warmup_tokens"),
        ({"over": "tokens", "warmup_steps": 5}, "warmup_steps"),
        ({"over": "tokens", "total_steps": 5}, "total_steps"),
        ({"warmup_steps": -1}, "warmup"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"kind": "cosine", "warmup_steps": 10, "total_steps": 10}, "total_steps"),
        ({"kind": "cosine", "over": "tokens", "warmup_tokens": "2K", "total_tokens": 2048}, "total_tokens"),
        ({"over": "tokens", "warmup_tokens": "2X"}, "warmup_tokens"),
        ({"kind": "cosin"}, "kind"),
        ({"over": "step"}, "over"),
    ],
)
def test_wrong_schedules_are_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ScheduleSettings(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"lr": 0.0}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"implementation": "fast"}, "implementation"),
    ],
)
def test_wrong_optimizers_are_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        OptimizerSettings(**kwargs)


def test_decay_is_for_matrices() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.LayerNorm(2), "frozen": nn.Linear(2, 2)})
    model["expert_bias"] = nn.ParameterDict({"gate_up_proj_bias": nn.Parameter(torch.zeros(2, 3))})
    model["frozen"].requires_grad_(False)
    decayed, others = parameter_groups(model.named_parameters(), 0.1)
    assert decayed["weight_decay"] == 0.1
    assert [id(p) for p in decayed["params"]] == [id(model["linear"].weight)]
    assert others["weight_decay"] == 0.0
    assert len(others["params"]) == 4  # the linear bias, two of the norm, one of the experts


def test_optimizer_takes_the_settings() -> None:
    settings = OptimizerSettings(lr=1e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    optimizer = build_optimizer(nn.Linear(2, 2).named_parameters(), settings)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.9), 1e-6)
        assert not group["fused"]  # `auto` on the host


@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_implementations_agree(kind: Any) -> None:
    start = nn.Linear(4, 3).state_dict()
    results = []
    for implementation in ("auto", kind):
        model = nn.Linear(4, 3)
        model.load_state_dict(start)
        optimizer = build_optimizer(model.named_parameters(), OptimizerSettings(implementation=implementation))
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        results.append(model.weight.detach())
    assert optimizer.param_groups[0][{"loop": "foreach"}.get(kind, kind)] is (kind != "loop")
    torch.testing.assert_close(results[0], results[1])


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="requires a gradient"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False).named_parameters(), OptimizerSettings())
