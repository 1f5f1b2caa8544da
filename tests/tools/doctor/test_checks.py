"""What the checks find in right modules and in two whose faults no set-up check can see, on processes of the pool."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx import CausalLMModule
from lightning_longctx.tools.doctor.cases import Group, draw_groups
from lightning_longctx.tools.doctor.checks import Subject, check_evaluation, check_gradients, check_resume, probe_rows
from lightning_longctx.tools.doctor.compare import Finding
from lightning_longctx.tools.doctor.reference import Reference, routing_margin
from tests.helpers.pool import run_ranks
from tests.tools.doctor import modules

pytestmark = pytest.mark.distributed


def subject_of(name: str) -> Subject:
    if name == "moe":
        config = {"router_aux_loss_coef": 0.1}
        module: Any = CausalLMModule(config="tiny-qwen3-moe", config_overrides=config).for_cpu_check(full=False)
    else:
        module = getattr(modules, name)()
    return Subject(module, None, 64, 1e-5, 48)


def group_of(world: int, sp: int) -> Group:
    (group,) = draw_groups([(world, sp)], 2, seed=1)
    return group


def expect(name: str, world: int, sp: int) -> tuple[list[Any], torch.Tensor]:
    """The reference: in one process, whatever the world is."""
    warnings.simplefilter("ignore")
    subject, reference = subject_of(name), Reference(subject_of(name).module)
    steps = reference.steps([subject.rows(step) for step in group_of(world, sp).steps])
    (tokens,) = reference.token_losses(subject.rows([probe_rows(48)[0]]))
    return steps, tokens


def examine(name: str, world: int, sp: int, steps: list[Any], tokens: torch.Tensor) -> list[Finding]:
    warnings.simplefilter("ignore")
    subject, group = subject_of(name), group_of(world, sp)
    findings = check_gradients(subject, group, steps)
    findings += check_evaluation(subject, world, sp, tokens, name == "moe")
    plans = [plan for step in group.steps for plan in step][: 2 * group.dp_size]
    return [*findings, check_resume(subject, world, sp, plans, Path())]


def verdicts(name: str, world: int, sp: int) -> dict[str, Finding]:
    steps, tokens = run_ranks(expect, 1, name, world, sp)[0]
    ranks = run_ranks(examine, world, name, world, sp, steps, tokens)
    assert all(rank == ranks[0] for rank in ranks), "every rank finds the same"
    return {finding.check: finding for finding in ranks[0]}


CHECKS = {"loss", "gradients", "evaluation", "isolation", "causality", "resume"}


@pytest.mark.parametrize("name", ["Right", "moe"])
@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 2)])
def test_a_right_module_is_found_right(name: str, world: int, sp: int) -> None:
    found = verdicts(name, world, sp)
    assert set(found) == CHECKS
    assert {finding.verdict for finding in found.values()} == {"ok"}, found
    assert 0 < found["gradients"].error <= 1e-5, "it is not compared with itself"
    assert found["isolation"].error <= (1e-6 if name == "moe" else 0.0)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2)])
def test_a_block_that_forgets_to_exchange_is_found(world: int, sp: int) -> None:
    found = verdicts("OneBlockForgets", world, sp)
    assert {check for check, finding in found.items() if finding.verdict == "fault"} >= {"gradients", "evaluation"}
    assert found["gradients"].error > 1e-3
    assert found["gradients"].where in {"embedding.weight", "head.weight"} or "blocks." in found["gradients"].where
    if sp == 1:
        assert found["isolation"].verdict == "fault", "it attends across documents"
        assert found["causality"].verdict == "ok"


@pytest.mark.parametrize(("world", "sp", "verdict"), [(1, 1, "ok"), (2, 1, "ok"), (2, 2, "fault")])
def test_what_breaks_at_the_border_of_a_shard_is_found_only_there(world: int, sp: int, verdict: str) -> None:
    found = verdicts("Shifts", world, sp)
    assert found["gradients"].verdict == found["evaluation"].verdict == found["loss"].verdict == verdict


@pytest.mark.parametrize(
    ("name", "note"),
    [("Silent", "`validation_step` returns no `per_token_loss`"), ("TrainsOnly", "there is no `validation_step`")],
)
def test_what_cannot_be_compared_is_said(name: str, note: str) -> None:
    found = verdicts(name, 1, 1)
    assert found["gradients"].verdict == found["resume"].verdict == "ok"
    assert found["isolation"].verdict == "skipped"
    assert found["isolation"].note == note


def test_the_margin_is_the_smallest_gap_of_any_router() -> None:
    subject = subject_of("moe")
    subject.module.configure_model()
    router = subject.module.model.model.layers[1].mlp.gate
    with torch.no_grad():
        router.weight[1:] = router.weight[0]  # the second expert is as good as the others
    row = subject.rows([probe_rows(48)[0]])[0]
    with routing_margin(subject.module) as margin:
        assert margin == [float("inf")]
        subject.module.training_step(row, 0)
    assert margin[0] < 1e-6
    margin_before = margin[0]
    subject.module.training_step(row, 0)
    assert margin[0] == margin_before, "nobody watches any more"


@pytest.mark.filterwarnings("ignore")
def test_a_tie_excuses_the_step_that_it_is_in_alone() -> None:
    subject = Subject(modules.RoutesOnce(), None, 64, 1e-5, 24)
    (group,) = draw_groups([(1, 1)], 2, seed=1, row_tokens=24)
    margins = [step.margin for step in Reference(subject.module).steps([subject.rows(step) for step in group.steps])]
    assert margins[0] == 0 < margins[1]
