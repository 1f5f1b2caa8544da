"""The table of logged keys in ``docs/callbacks.md`` against a run that logs all of them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from lightning_longctx.callbacks import AsyncDCPCheckpoint, ExactTokenMean, TrainingMetrics
from lightning_longctx.callbacks.checkpoint_report import CheckpointReport
from lightning_longctx.checkpoint.filesystem import FileSystem
from tests.callbacks.toy import ToyLM, loader, make_batch, make_trainer

COUNTERS = "data/<counter>"  # from a data module, which this run has none of: tests/datamodules/test_metrics.py
PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


def documented_keys() -> set[str]:
    section = PAGE.read_text().split("## What is logged")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE))


class _Slow(FileSystem):
    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.suffix == ".distcp":
            time.sleep(0.2)


def test_the_table_lists_what_a_run_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [make_batch(seed, 5) for seed in range(2)]
    monkeypatch.setattr("lightning_longctx.checkpoint.writer.FileSystem", _Slow)  # so that a write is seen under way
    saving = AsyncDCPCheckpoint("checkpoints", every_n_train_steps=1)
    trainer = make_trainer([ExactTokenMean(), TrainingMetrics(), saving], enable_checkpointing=True)
    trainer.fit(ToyLM(), loader(batches), [loader(batches), loader(batches)])
    trainer.test(ToyLM(), [loader(batches), loader(batches)], verbose=False)
    logged = {key for _, row in trainer.logger.rows for key in row} - {"epoch"}  # Lightning's own
    plain = {re.sub(r"/(weights|optimizer)$", "/<slot>", re.sub(r"_idx_\d+$", "_idx_<i>", key)) for key in logged}
    assert plain == documented_keys() - {COUNTERS}


def test_the_class_docstring_lists_the_same_keys() -> None:
    listed = set(re.findall(r"``((?:train|data|val|test)/[^`]+)``", TrainingMetrics.__doc__ or ""))
    own = {key for key in documented_keys() if not key.startswith("checkpoint/")}
    assert listed == own - {"test/loss/dataloader_idx_<i>"}  # said once, for validation
    saving = set(re.findall(r"``(checkpoint/[^`]+)``", CheckpointReport.__doc__ or ""))
    assert saving == documented_keys() - own
