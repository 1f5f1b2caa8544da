"""What is compared in a world of processes: gradients of random layouts, evaluation, isolation, causality, resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_longctx.batch import PackedBatch
from lightning_longctx.tools.doctor.cases import Group, RowPlan, build_row
from lightning_longctx.tools.doctor.compare import Difference, Finding, judge, largest_difference, worst_of
from lightning_longctx.tools.doctor.fits import fresh, make_trainer, replica_rows, run_steps, strategy_like, whole
from lightning_longctx.tools.doctor.reference import ReferenceStep
from lightning_longctx.topology import topology_of

__all__ = ["Subject", "check_evaluation", "check_gradients", "check_resume", "probe_rows"]

# A gradient that is zero but for rounding is measured against this part of the largest one.
_FLOOR = 1e-2
_RESUME_RATE = 0.05
# Groups of tokens of one expert change size with a changed token elsewhere, and with them the order of summation.
_ROUTED = 1e-6


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        module: the user's module, small or whole; never given to a Trainer itself.
        strategy: of the configuration, for its settings; None or a name for the default.
        vocabulary: token ids are below it.
        tolerance: relative error up to which gradients and losses count as equal.
        row_tokens: tokens of a row.
    """

    module: pl.LightningModule
    strategy: Strategy | str | None
    vocabulary: int
    tolerance: float
    row_tokens: int

    def rows(self, plans: Sequence[RowPlan]) -> list[PackedBatch]:
        """The packed batches of plans."""
        return [build_row(plan, self.vocabulary) for plan in plans]


def check_gradients(subject: Subject, group: Group, expected: Sequence[ReferenceStep]) -> list[Finding]:
    """Run a group of layouts and compare loss and gradients of each with the reference.

    Args:
        subject: what is examined.
        group: the layouts; their world is this one.
        expected: of each step.
    """
    steps = [subject.rows(step) for step in group.steps]
    strategy = strategy_like(subject.strategy, group.sp_size)
    got = run_steps(fresh(subject.module), strategy, group.world_size, group.accumulate, steps)
    assert len(got) == len(expected)
    findings = []
    for check in ("loss", "gradients"):
        differences: list[tuple[Difference, float]] = []
        for number, (record, reference) in enumerate(zip(got, expected, strict=True)):
            if check == "loss":
                pair = {"loss": torch.tensor(record.loss)}, {"loss": torch.tensor(reference.loss)}
                found = Difference(largest_difference(*pair).error, f"step {number}")
            else:
                found = largest_difference(record.gradients, reference.gradients, _FLOOR)
            differences.append((found, reference.margin))
        worst, verdict = worst_of(differences, subject.tolerance)
        sizes = (group.world_size, group.sp_size, group.accumulate, len(steps))
        findings.append(Finding(check, *sizes, worst.error, worst.where, verdict))
    return findings


def probe_rows(row_tokens: int) -> tuple[RowPlan, int]:
    """A row of three documents that cross every border of a shard, and a token in the middle of the second."""
    first, third = row_tokens // 5, row_tokens // 3
    second = row_tokens - first - third
    return RowPlan((first, second, third), row_tokens, (0, 0), 7), first + second // 2


class _TokenLosses(Callback):
    """Gathers the loss of each token of each row in evaluation; None where a step returns none."""

    def __init__(self) -> None:
        self.rows: list[Tensor | None] = []

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        found = outputs.get("per_token_loss") if isinstance(outputs, dict) else None
        if found is None:
            self.rows.append(None)
            return
        group = topology_of(trainer).sp_group
        local = found[0].detach().contiguous()
        parts = [local]
        if group is not None:
            parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, local, group=group)
        self.rows.append(torch.cat(parts))


def check_evaluation(
    subject: Subject, world_size: int, sp_size: int, expected: Tensor, has_experts: bool
) -> list[Finding]:
    """Validate before any fit: losses as in the reference, nothing from other documents, nothing from later tokens.

    Args:
        subject: what is examined.
        world_size: processes.
        sp_size: ranks of a row.
        expected: the loss of each token of the row of :func:`probe_rows`.
        has_experts: whether other documents may change in the last bits.
    """
    sizes = (world_size, sp_size, 1, 1)
    if not is_overridden("validation_step", subject.module):
        return _not_evaluated(sizes, "there is no `validation_step`")
    plan, token = probe_rows(subject.row_tokens)
    (before,) = subject.rows([plan])
    (after,) = subject.rows([plan])
    after["input_ids"][0, token] = (after["input_ids"][0, token] + 1) % subject.vocabulary
    rows = [row for row in (before, after) for _ in range(world_size // sp_size)]
    keep = _TokenLosses()
    trainer = make_trainer(strategy_like(subject.strategy, sp_size), world_size, 1, 1, keep)
    module = fresh(subject.module)
    module.val_dataloader = lambda: replica_rows(rows, trainer)  # type: ignore[method-assign]
    trainer.validate(module, verbose=False)
    plain, changed = keep.rows
    if plain is None or changed is None:
        return _not_evaluated(sizes, "`validation_step` returns no `per_token_loss`")
    bounds = before["cu_seqlens"].tolist()
    others = torch.ones_like(plain, dtype=torch.bool)
    others[bounds[1] : bounds[2]] = False
    past = torch.zeros_like(others)
    past[bounds[1] : token - 1] = True  # the token before the changed one has it as its target
    limit = _ROUTED if has_experts else 0.0
    errors = {
        "evaluation": ((plain - expected).abs(), subject.tolerance),
        "isolation": ((changed - plain).abs() * others, limit),
        "causality": ((changed - plain).abs() * past, limit),
    }
    findings = []
    for check, (difference, allowed) in errors.items():
        error = float(difference.max() / plain.abs().max())
        where = f"token {int(difference.argmax())}"
        findings.append(Finding(check, *sizes, error, where, judge(error, allowed)))
    return findings


def _not_evaluated(sizes: tuple[int, int, int, int], why: str) -> list[Finding]:
    return [Finding(check, *sizes, None, "", "skipped", why) for check in ("evaluation", "isolation", "causality")]


def check_resume(subject: Subject, world_size: int, sp_size: int, plans: Sequence[RowPlan], folder: Path) -> Finding:
    """Two steps at once, and one, a checkpoint, another process's module and one more: the same weights.

    Args:
        subject: what is examined.
        world_size: processes.
        sp_size: ranks of a row.
        plans: rows of two steps.
        folder: for the checkpoint; shared by the processes.
    """
    rows = subject.rows(plans)
    half = len(rows) // 2

    def fit(steps: int, start: int, checkpoint: Path | None = None, resume: Path | None = None) -> dict[str, Tensor]:
        trainer = make_trainer(strategy_like(subject.strategy, sp_size), world_size, 1, steps)
        module = fresh(subject.module, _RESUME_RATE)
        module.train_dataloader = lambda: replica_rows(rows, trainer, start)  # type: ignore[method-assign]
        module.val_dataloader = lambda: []  # type: ignore[method-assign]
        trainer.fit(module, ckpt_path=None if resume is None else str(resume))
        if checkpoint is not None:
            trainer.save_checkpoint(checkpoint)
        return {name: whole(parameter) for name, parameter in module.named_parameters()}

    unbroken = fit(2, 0)
    checkpoint = folder / f"world{world_size}_sp{sp_size}.ckpt"
    first = fit(1, 0, checkpoint=checkpoint)
    resumed = fit(2, half, resume=checkpoint)
    sizes = (world_size, sp_size, 1, 1)
    if largest_difference(first, unbroken).error == 0:
        return Finding("resume", *sizes, None, "", "fault", "the second step changed no weight")
    error, where = largest_difference(resumed, unbroken, _FLOOR)
    return Finding("resume", *sizes, error, where, judge(error, subject.tolerance))
