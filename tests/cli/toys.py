"""Somebody else's classes, as small as they can be: what a user of the command line brings along."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longctx.errors import ConfigurationError, DataError
from lightning_longctx.units import TokenCount


@dataclass(frozen=True)
class ToyOptimizer:
    """A group of settings."""

    lr: float = 0.1
    momentum: float = 0.0


class ToyModel(LightningModule):
    """A linear layer; its steps give what TrainingMetrics reads."""

    def __init__(self, width: int = 2, optimizer: ToyOptimizer = ToyOptimizer()) -> None:  # noqa: B008
        super().__init__()
        self.optimizer_settings = optimizer
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        losses = self.layer(batch["inputs"]).square()[..., 0]
        return {"loss": losses.mean(), "per_token_loss": losses.detach()}

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.optimizer_settings.lr)


class SelfFedModel(ToyModel):
    """Brings its own loader, so that a configuration needs no ``data``."""

    def train_dataloader(self) -> DataLoader[Any]:
        return rows(self.layer.in_features)


class FailingModel(SelfFedModel):
    """Fails on one rank (-1: on all) in its second step, as ``how`` says."""

    def __init__(self, rank: int = 0, how: str = "data", width: int = 2) -> None:
        super().__init__(width)
        self.rank, self.how = rank, how

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if batch_idx == 1 and self.rank in (-1, int(os.environ.get("LOCAL_RANK", "0"))):
            if self.how == "data":
                raise DataError("data.sources.toys", "must be readable", "toys.jsonl line 7", "Mend the line.")
            raise RuntimeError("a bug of the user")
        return super().training_step(batch, batch_idx)


class ToyData(LightningDataModule):
    """A few rows."""

    def __init__(self, width: int = 2, max_seq_len: TokenCount = 4096, names: dict[str, str] | None = None) -> None:
        super().__init__()
        self.width, self.max_seq_len, self.names = width, max_seq_len, names

    def train_dataloader(self) -> DataLoader[Any]:
        return rows(self.width)

    def val_dataloader(self) -> DataLoader[Any]:
        return rows(self.width)


class ToyStrategy(SingleDeviceStrategy):
    """A strategy with settings, all of which have defaults (the form that stock Lightning refused by class path)."""

    def __init__(self, sequence_parallel_size: int = 1) -> None:
        super().__init__(device="cpu")
        self.sequence_parallel_size = sequence_parallel_size


class BrokenCallback(Callback):
    """Cannot be built: ``how`` says why."""

    def __init__(self, how: str = "configuration") -> None:
        if how == "configuration":
            raise ConfigurationError("callbacks.broken", "must never be built", how, "Leave it out.")
        raise ValueError("a bug of the user")


class Unrelated:
    """No plug-in at all."""


def rows(width: int) -> DataLoader[Any]:
    """Four packed batches, as far as the metrics look at them."""
    return DataLoader([_row(width) for _ in range(4)], batch_size=None)  # type: ignore[arg-type]


def _row(width: int) -> dict[str, Any]:
    return {"inputs": torch.ones(1, 3, width), "shift_labels": torch.zeros(1, 3, dtype=torch.int64)}
