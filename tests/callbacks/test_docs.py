"""The table of logged keys in ``docs/callbacks.md`` against a run that logs all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule

from lightning_longctx.callbacks import ExactTokenMean, TrainingMetrics
from tests.callbacks.toy import ToyLM, loader, make_batch, make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


def documented_keys() -> set[str]:
    section = PAGE.read_text().split("## What is logged")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE))


class _Data(LightningDataModule):
    """Tells what a data module can tell; the counters of ours are tests/datamodules/test_metrics.py's."""

    def __init__(self, loaders: dict[str, Any]) -> None:
        super().__init__()
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return self.loaders["train"]

    def val_dataloader(self) -> Any:
        return self.loaders["val"]

    test_dataloader = val_dataloader

    def global_counters(self) -> dict[str, int]:
        return {"rows": 2}

    def global_mix(self) -> dict[str, float]:
        return {"books": 1.0}

    def wait_seconds(self) -> list[float]:
        return [0.5]


def _as_documented(key: str) -> str:
    key = re.sub(r"_idx_\d+$", "_idx_<i>", key)
    return {"data/rows": "data/<counter>", "data/mix/books": "data/mix/<source>"}.get(key, key)


def test_the_table_lists_what_a_run_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "max_memory_allocated", lambda device: 2**30, raising=False)
    batches = [make_batch(seed, 5) for seed in range(2)]
    data = _Data({"train": loader(batches), "val": [loader(batches), loader(batches)]})
    trainer = make_trainer([ExactTokenMean(), TrainingMetrics(device_peak_tflops=1.0)])
    module = ToyLM()
    module.attention_width = 4
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    logged = {key for _, row in trainer.logger.rows for key in row} - {"epoch"}  # Lightning's own
    assert {_as_documented(key) for key in logged} == documented_keys()


def test_the_class_docstring_lists_the_same_keys() -> None:
    listed = set(re.findall(r"``((?:train|data|val|test)/[^`]+)``", TrainingMetrics.__doc__ or ""))
    assert listed == documented_keys() - {"test/loss/dataloader_idx_<i>"}  # said once, for validation
