"""Documents that tell where they came from, and a model that notes what it was trained on."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lightning_longctx.batch import validate_packed_batch
from lightning_longctx.datamodules import DynamicBatchingDataModule, FixedBufferPolicy, LoadingSettings
from tests.helpers.trainers import quiet_trainer


def records(count: int, low: int = 3, high: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` documents of ``low`` to ``high`` tokens; the tokens of document i are all i + 1."""
    lengths = np.random.default_rng(seed).integers(low, high + 1, count)
    return [{"input_ids": [i + 1] * int(length)} for i, length in enumerate(lengths)]


class Stream:
    """Records that can only be iterated."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.items)


def compress(path: Path, data: bytes) -> None:
    """Write ``data`` to a file whose suffix tells how: ``.gz`` or ``.zst``; plain otherwise."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        import pyarrow

        data = pyarrow.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


def data_module(sources: dict[str, Any] | None = None, size: int = 4, **settings: Any) -> DynamicBatchingDataModule:
    """A data module with a window of 32 tokens and a small pool; keywords of ``LoadingSettings`` may be mixed in."""
    loading = {name: settings.pop(name) for name in list(settings) if name in LoadingSettings.__dataclass_fields__}
    settings.setdefault("max_seq_len", 32)
    return DynamicBatchingDataModule(
        sources or {"a": records(20), "b": records(12, seed=1)},
        buffer_policy=settings.pop("buffer_policy", None) or FixedBufferPolicy(size),
        loading=LoadingSettings(**loading),
        **settings,
    )


def keys_of(row: Any) -> list[tuple[int, int]]:
    """(source id, number) of the documents of a row, without padding."""
    return [(source, number) for source, number in row["document_keys"].tolist() if source >= 0]


class Recorder(pl.LightningModule):
    """Trains one embedding and keeps, for each micro-batch, the documents and the tokens it saw."""

    def __init__(self, estimate: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 4)
        self.estimate = estimate
        self.seen: list[list[tuple[int, int]]] = []
        self.evaluated: list[list[tuple[int, int]]] = []
        self.tokens: list[list[int]] = []

    def loss(self, batch: Any) -> Tensor:
        validate_packed_batch(batch)
        return self.table(batch["input_ids"]).square().sum() / batch["loss_divisor"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(keys_of(batch))
        self.tokens.append(batch["input_ids"][0].tolist())
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.evaluated.append(keys_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self.estimate:
            return optimizer
        horizon = self.trainer.estimated_stepping_batches  # makes Lightning fetch a batch before a restore
        assert horizon
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1000)}


def trainer(**settings: Any) -> pl.Trainer:
    """A quiet Trainer for one epoch."""
    return quiet_trainer(**({"max_epochs": 1} | settings))
