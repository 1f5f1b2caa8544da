"""Layouts and rows are drawn alike everywhere, keep the contract of a packed batch, and are cut into documents."""

from __future__ import annotations

import pytest
import torch

from lightning_longctx.batch import validate_packed_batch
from lightning_longctx.tools.doctor.cases import RowPlan, build_row, document_rows, draw_groups

SIZES = [(1, 1), (2, 2), (4, 2)]


def test_the_same_seed_draws_the_same() -> None:
    assert draw_groups(SIZES, 12, seed=3) == draw_groups(SIZES, 12, seed=3)
    assert draw_groups(SIZES, 12, seed=3) != draw_groups(SIZES, 12, seed=4)


def test_layouts_are_spread_over_the_sizes() -> None:
    groups = draw_groups(SIZES, 10, seed=0, fits=2)
    assert [(group.world_size, group.sp_size) for group in groups] == [pair for pair in SIZES for _ in range(2)]
    assert sum(len(group.steps) for group in groups) == 12, "rounded up to two for each of six fits"
    for group in groups:
        assert all(len(step) == group.dp_size * group.accumulate for step in group.steps)


@pytest.mark.parametrize("seed", range(5))
def test_rows_keep_the_contract(seed: int) -> None:
    for group in draw_groups(SIZES, 30, seed=seed):
        for step in group.steps:
            for plan in step:
                validate_packed_batch(build_row(plan, 16))


def test_a_row_by_hand() -> None:
    row = build_row(RowPlan((3, 1), 6, (1, 2), 0), 16)
    first, second, third, fourth = row["input_ids"][0, :4].tolist()
    assert row["input_ids"][0].tolist() == [first, second, third, fourth, 0, 0]
    assert row["shift_labels"][0].tolist() == [second, -100, -100, -100, -100, -100]
    assert row["position_ids"][0].tolist() == [0, 1, 2, 0, 0, 1]
    assert row["source_ids"][0].tolist() == [0, 0, 0, 1, -1, -1]
    assert row["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert row["max_seqlen"] == 3
    assert row["loss_divisor"] == 6


def test_documents_put_together_are_the_row() -> None:
    row = build_row(RowPlan((5, 1, 7), 16, (2, 6), 0), 16)
    documents = document_rows(row)
    assert [document["max_seqlen"] for document in documents] == [5, 1, 7, 3]
    for key in ("input_ids", "shift_labels", "position_ids", "source_ids"):
        assert torch.equal(torch.cat([document[key] for document in documents], dim=1), row[key])
    for document in documents:
        validate_packed_batch(document)
        assert document["loss_divisor"] == 16
