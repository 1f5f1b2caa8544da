"""The table of logged keys in ``docs/callbacks.md`` against a run that logs all of them."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from lightning_longctx.callbacks import ExactTokenMean, MoERouterHeatmap, TrainingMetrics
from lightning_longctx.callbacks.router_metrics import RouterLoad
from tests.callbacks.toy import ToyLM, loader, make_batch, make_trainer

COUNTERS = "data/<counter>"  # from a data module, which this run has none of: tests/datamodules/test_metrics.py
PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


def documented_keys(logged_by: str = "TrainingMetrics") -> set[str]:
    section = PAGE.read_text().split("## What is logged")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if f"`{logged_by}`" in line]
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row[0])}


def test_the_table_lists_what_a_run_logs() -> None:
    batches = [make_batch(seed, 5) for seed in range(2)]
    trainer = make_trainer([ExactTokenMean(), TrainingMetrics()])
    trainer.fit(ToyLM(), loader(batches), [loader(batches), loader(batches)])
    trainer.test(ToyLM(), [loader(batches), loader(batches)], verbose=False)
    logged = {key for _, row in trainer.logger.rows for key in row} - {"epoch"}  # Lightning's own
    assert {re.sub(r"_idx_\d+$", "_idx_<i>", key) for key in logged} == documented_keys() - {COUNTERS}


def test_the_class_docstring_lists_the_same_keys() -> None:
    listed = set(re.findall(r"``((?:train|data|val|test)/[^`]+)``", TrainingMetrics.__doc__ or ""))
    assert listed == documented_keys() - {"test/loss/dataloader_idx_<i>"}  # said once, for validation


def test_the_table_lists_what_the_router_heatmap_logs() -> None:
    load = RouterLoad(1, 2, ("a",), ("layer_00",), (torch.tensor([3, 1]),), padding=1, dropped=0)
    logged = {key.removesuffix("_mean") for key in load.metrics(full=False)}
    assert logged == documented_keys("MoERouterHeatmap")
    assert logged == set(re.findall(r"^    ``(moe/\w+)``", MoERouterHeatmap.__doc__ or "", flags=re.MULTILINE))
