"""The table of logged keys in ``docs/callbacks.md`` against a run that logs all of them, and the docs' examples."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule

from lightning_longctx.callbacks import (
    AsyncDCPCheckpoint,
    ChannelLoss,
    ChannelOptions,
    ExactTokenMean,
    MoERouterHeatmap,
    TrainingMetrics,
)
from lightning_longctx.callbacks.checkpoint_report import CheckpointReport
from lightning_longctx.callbacks.router_metrics import RouterLoad
from lightning_longctx.checkpoint.filesystem import FileSystem
from tests.callbacks.channels import BATCHES, NAMES
from tests.callbacks.toy import ToyLM, loader, make_batch, make_trainer

DOCS = Path(__file__).parents[2] / "docs"
KEY = re.compile(r"`([a-z_]+/[^`]+)`")


def documented_rows() -> dict[str, set[str]]:
    """The keys of the table by the class that logs them: the first cell, where it names several too."""
    section = (DOCS / "callbacks.md").read_text().split("## What is logged")[1].split("\n## ")[0]
    found: dict[str, set[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| `"):
            owner = re.findall(r"`(\w+)`", cells[-1])[0]
            found.setdefault(owner, set()).update(KEY.findall(cells[0]))
    return found


def logged_keys(chosen: list, batches: list) -> set[str]:
    trainer = make_trainer(chosen)
    trainer.fit(ToyLM(), loader(batches), [loader(batches), loader(batches)])
    trainer.test(ToyLM(), [loader(batches), loader(batches)], verbose=False)
    logged = {key for _, row in trainer.logger.rows for key in row} - {"epoch"}  # Lightning's own
    return {re.sub(r"_idx_\d+$", "_idx_<i>", key) for key in logged}


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
    of_strategy = {"offload/<counter>"}  # of activation offload: tests/strategies
    assert {_as_documented(key) for key in logged} == documented_rows()["TrainingMetrics"] - of_strategy


def test_the_table_lists_what_channel_loss_logs() -> None:
    logged = logged_keys([ChannelLoss(source_names=NAMES), ChannelLoss(group_by="position")], BATCHES)
    words = {key.replace("/dataloader_idx_<i>", "") for key in logged}
    plain = {key.removeprefix("val_").removeprefix("test_") for key in words}
    names = {"code": "<source>", "my_prose": "<source>", "web": "<source>", "0-4K": "<range>"}
    keys = {f"{word}/{names.get(name, name)}" for word, name in (key.split("/") for key in plain)}
    documented = documented_rows()["ChannelLoss"]
    assert keys == {key for key in documented if not key.startswith(("val_", "test_"))}
    for stage in ("val_", "test_"):
        assert {key.removeprefix(stage) for key in words if key.startswith(stage)} == plain
        assert f"{stage}channel_loss/<source>" in documented


def test_the_page_lists_every_key() -> None:
    page = (DOCS / "channel_loss.md").read_text()
    options = ChannelOptions(counters=["samples", "input_tokens", "label_tokens"])
    logged = logged_keys([ChannelLoss(source_names=NAMES, options=options)], BATCHES)
    for key in logged:
        if key.startswith("channel_"):
            assert f"`{re.sub('/(code|web|my_prose)', '/<source>', key)}`" in page


def test_the_class_docstring_lists_the_same_keys() -> None:
    listed = set(re.findall(r"``((?:train|data|offload|val|test)/[^`]+)``", TrainingMetrics.__doc__ or ""))
    expected = documented_rows()["TrainingMetrics"] - {"test/loss/dataloader_idx_<i>"}  # said once, for validation
    assert listed == expected
    listed = set(re.findall(r"``(channel_[a-z_]+/[^`]+)``", ChannelLoss.__doc__ or ""))
    assert listed == {key for key in documented_rows()["ChannelLoss"] if key.startswith("channel_")}


def test_the_table_lists_what_the_router_heatmap_logs() -> None:
    load = RouterLoad(1, 2, ("a",), ("layer_00",), (torch.tensor([3, 1]),), padding=1, dropped=0)
    logged = {key.removesuffix("_mean") for key in load.metrics(full=False)}
    assert logged == documented_rows()["MoERouterHeatmap"]
    assert logged == set(re.findall(r"^    ``(moe/\w+)``", MoERouterHeatmap.__doc__ or "", flags=re.MULTILINE))


class _Slow(FileSystem):
    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.suffix == ".distcp":
            time.sleep(0.2)


def test_the_table_lists_what_checkpoints_log(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [make_batch(seed, 5) for seed in range(2)]
    monkeypatch.setattr(
        "lightning_longctx.checkpoint.object_store.FileSystem", _Slow
    )  # so that a write is seen under way
    saving = AsyncDCPCheckpoint("checkpoints", every_n_train_steps=1)
    trainer = make_trainer([saving], enable_checkpointing=True)
    trainer.fit(ToyLM(), loader(batches), [loader(batches)])
    logged = {key for _, row in trainer.logger.rows for key in row if key.startswith("checkpoint/")}
    plain = {re.sub(r"/(weights|optimizer)$", "/<slot>", key) for key in logged}
    assert plain == documented_rows()["AsyncDCPCheckpoint"]
    assert plain == set(re.findall(r"``(checkpoint/[^`]+)``", CheckpointReport.__doc__ or ""))
