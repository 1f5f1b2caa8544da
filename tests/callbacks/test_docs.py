"""The table of logged keys in ``docs/callbacks.md`` against a run that logs all of them."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_longctx.callbacks import ExactTokenMean, TrainingMetrics
from tests.callbacks.toy import ToyLM, loader, make_batch, make_trainer

# From parts that this run has none of: tests/datamodules/test_metrics.py, tests/strategies/test_offload_metrics.py
COUNTERS = {"data/<counter>", "offload/<counter>"}
PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


def documented_keys() -> set[str]:
    section = PAGE.read_text().split("## What is logged")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE))


def test_the_table_lists_what_a_run_logs() -> None:
    batches = [make_batch(seed, 5) for seed in range(2)]
    trainer = make_trainer([ExactTokenMean(), TrainingMetrics()])
    trainer.fit(ToyLM(), loader(batches), [loader(batches), loader(batches)])
    trainer.test(ToyLM(), [loader(batches), loader(batches)], verbose=False)
    logged = {key for _, row in trainer.logger.rows for key in row} - {"epoch"}  # Lightning's own
    assert {re.sub(r"_idx_\d+$", "_idx_<i>", key) for key in logged} == documented_keys() - COUNTERS


def test_the_class_docstring_lists_the_same_keys() -> None:
    listed = set(re.findall(r"``((?:train|data|offload|val|test)/[^`]+)``", TrainingMetrics.__doc__ or ""))
    assert listed == documented_keys() - {"test/loss/dataloader_idx_<i>"}  # said once, for validation
