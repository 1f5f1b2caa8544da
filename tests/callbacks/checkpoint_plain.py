"""A module, a loader and a Trainer without anything of this package, for checkpoints of other people's runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.trainers import quiet_trainer


class Numbers(Dataset[tuple[int, Tensor]]):
    """Sixteen numbered rows."""

    def __init__(self) -> None:
        self.rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index]


class Plain(pl.LightningModule):
    """Dropout and batch normalization, so that random numbers and buffers matter; notes rows and losses."""

    def __init__(self, optimizers: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizers_of = optimizers or (lambda module: torch.optim.AdamW(module.parameters(), lr=0.01))
        self.notes: list[tuple[list[int], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, values = batch
        loss = self.net(values).square().mean()
        self.notes.append((rows.tolist(), float(loss.detach())))
        return torch.as_tensor(loss)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch[1]).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


def loader(shuffle: bool = False) -> DataLoader[tuple[int, Tensor]]:
    """Four batches."""
    return DataLoader(Numbers(), batch_size=4, shuffle=shuffle)


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A quiet one that may save."""
    return quiet_trainer(callbacks=list(callbacks), **({"enable_checkpointing": True} | settings))
