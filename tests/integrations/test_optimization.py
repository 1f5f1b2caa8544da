"""Settings, groups and the learning rate as numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.integrations.optimization import (
    OptimizerSettings,
    ScheduleSettings,
    build_optimizer,
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
    assert learning_rate_factor(settings, step, tokens, horizon) == pytest.approx(expected)


def test_warmup_shorter_than_a_step_is_no_warmup() -> None:
    settings = ScheduleSettings(over="tokens", warmup_tokens=100)
    assert [learning_rate_factor(settings, step, 4096, None) for step in (0, 1)] == [1.0, 1.0]


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
