"""Sixty random layouts of each model equal a plain process: loss and every gradient, fp32.

Layouts are drawn by the code behind ``longctx doctor``: processes, ranks of a row, accumulation, document lengths down
to one token, shards and rows without targets. The reference here is none of ours: documents one by one, transformers'
eager attention and experts in a loop, PyTorch's cross entropy; for the own module PyTorch's attention.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_longctx import LongContextFSDPStrategy
from lightning_longctx.tools.doctor.cases import build_row, draw_groups
from lightning_longctx.tools.doctor.compare import largest_difference
from lightning_longctx.tools.doctor.fits import fresh, run_steps
from tests.helpers.pool import run_ranks
from tests.parity.layouts import _Module
from tests.parity.models import CONFIGS
from tests.parity.reference import plain_model
from tests.parity.rows import VOCABULARY
from tests.strategies.own_model import OwnModule

pytestmark = pytest.mark.distributed

SIZES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
MODELS = ("llama", "qwen3", "qwen3_moe", "own")
LAYOUTS = 60
TOLERANCE = 1e-5


def groups_of(name):
    return draw_groups(SIZES, LAYOUTS, seed=MODELS.index(name), fits=2)


def replicas_of(name, group):
    """Of the two fits of each pair of sizes the second has copies of its shards, where the ranks allow it."""
    is_second = groups_of(name).index(group) % 2 == 1
    return 2 if is_second and group.dp_size % 2 == 0 else 1


def rows_of(group):
    return [[build_row(plan, VOCABULARY) for plan in step] for step in group.steps]


def template_of(name):
    if name == "own":
        return OwnModule()
    weights = {key: value.clone() for key, value in plain_model(name, seed=0).state_dict().items()}
    return _Module(CONFIGS[name], 0, weights)


def run_world(name, world):
    """In each process: all groups of this world. Rank 0 hands back what the steps gave."""
    import os

    warnings.simplefilter("ignore")
    records = [
        run_steps(
            fresh(template_of(name)),
            LongContextFSDPStrategy(group.sp_size, replicas_of(name, group)),
            *(world, group.accumulate, rows_of(group)),
        )
        for group in groups_of(name)
        if group.world_size == world
    ]
    return [[tuple(step) for step in group] for group in records] if os.environ["RANK"] == "0" else None


def logits_of(name, model, ids):
    if name != "own":
        return model(input_ids=ids, use_cache=False).logits[0]
    x = model.embedding(ids)
    for block in model.blocks:  # `exchanges` is off: PyTorch's attention
        x = block(x, None)
    return (x @ model.head.weight.t())[0]


def reference(name, rows):
    """Loss and gradients of the mean over all targets, from one document after another."""
    model = OwnModule(exchanges=False) if name == "own" else plain_model(name, seed=0)
    total, targets = torch.zeros(()), 0
    for row in rows:
        bounds = row["cu_seqlens"].tolist()
        for start, end in zip(bounds, bounds[1:], strict=False):
            labels = row["shift_labels"][0, start:end]
            if bool((labels != -100).any()):
                logits = logits_of(name, model, row["input_ids"][:, start:end])
                total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                targets += int((labels != -100).sum())
    (total / targets).backward()
    prefix = "" if name == "own" else "model."
    gradients = {prefix + key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return float(total.detach()) / targets, gradients


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_random_layouts_equal_a_plain_process(name, world):
    groups = [group for group in groups_of(name) if group.world_size == world]
    records = run_ranks(run_world, world, name, world, timeout=120)[0]
    assert len(records) == len(groups)
    for group, steps in zip(groups, records, strict=True):
        assert len(steps) == len(group.steps)
        for rows, (loss, gradients) in zip(rows_of(group), steps, strict=True):
            expected_loss, expected = reference(name, rows)
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            error, where = largest_difference(gradients, expected)
            assert error <= TOLERANCE, (where, group)


@pytest.mark.parametrize("name", MODELS)
def test_the_layouts_are_many_and_unkind(name):
    groups = groups_of(name)
    assert sum(len(group.steps) for group in groups) >= LAYOUTS
    assert {(group.world_size, group.sp_size) for group in groups} == set(SIZES)
    assert {group.accumulate for group in groups} == {1, 2, 3}
    copied = {(group.world_size, group.sp_size) for group in groups if replicas_of(name, group) == 2}
    assert copied == {(2, 1), (4, 1), (4, 2)}
    rows = [row for group in groups for step in rows_of(group) for row in step]
    lengths = {int(length) for row in rows for length in row["cu_seqlens"].diff()}
    assert {1, 2, 48} <= lengths
    labels = [row["shift_labels"][0] for row in rows]
    assert any(bool((row[:24] == -100).all()) and bool((row[24:] != -100).any()) for row in labels), "a shard"
    assert any(bool((row == -100).all()) for row in labels), "a row"
    assert any(len({bound % 12 for bound in row["cu_seqlens"].tolist()}) > 1 for row in rows), "across borders"
    for group in groups:
        assert all(bool((step[0]["shift_labels"] != -100).any()) for step in rows_of(group)), "no step without targets"
