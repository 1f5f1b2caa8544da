"""What the data module counts is logged, over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_longctx.callbacks import TrainingMetrics
from lightning_longctx.datamodules.row_state import COUNTERS
from tests.callbacks.toy import ToyLM, make_trainer
from tests.datamodules.helpers import data_module, records


class Counts(Callback):
    """Notes the data module's own counts at each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.datamodule.global_counters())


def test_every_counter_is_logged_with_its_value() -> None:
    counts = Counts()
    trainer = make_trainer([TrainingMetrics(), counts], max_epochs=1, max_steps=-1)
    items = [{"input_ids": [1] * len(record["input_ids"])} for record in records(20)]
    items += [{"input_ids": [2] * 40}, {"input_ids": []}]  # longer than the window of 32, and empty
    trainer.fit(ToyLM(), datamodule=data_module({"a": items}))
    rows = [row for _, row in trainer.logger.rows if "data/rows" in row]
    assert len(rows) == len(counts.seen) > 3
    for row, seen in zip(rows, counts.seen, strict=True):
        assert {name: row[f"data/{name}"] for name in COUNTERS} == pytest.approx(seen)
    assert counts.seen[-1]["documents_split"] == 1
    assert counts.seen[-1]["documents_without_tokens"] == 1
    assert counts.seen[-1]["documents_packed"] == 22
