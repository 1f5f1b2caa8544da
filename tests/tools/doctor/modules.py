"""Modules as users have them: a right one, and some whose faults no set-up check can see."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_longctx.loss import causal_lm_loss
from tests.strategies.own_model import OwnModule


class Right(OwnModule):
    """Exchanges in all blocks."""


class OneBlockForgets(OwnModule):
    """Its second block attends with PyTorch: across documents, and to the tokens of its own rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].exchanges = False


class Forgets(OwnModule):
    """Knows nothing of sequence parallelism."""

    def __init__(self) -> None:
        super().__init__(exchanges=False)


class LocalMean(OwnModule):
    """Averages over the targets of its own shard and micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.loss_of(batch)
        mean = out.loss * batch["loss_divisor"] / (batch["shift_labels"] != -100).sum().clamp(min=1)
        return {"loss": mean, "per_token_loss": out.per_token_loss}


class Shifts(OwnModule):
    """Mixes each token with the one before it, which lies on another rank at the border of a shard."""

    def loss_of(self, batch: Any) -> Any:
        x = self.embedding(batch["input_ids"])
        x = x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] * (batch["position_ids"] > 0)[..., None]
        for block in self.blocks:
            x = block(x, batch)
        return causal_lm_loss(x, self.head.weight, batch)


class Silent(OwnModule):
    """Returns nothing in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss_of(batch).mean


class TrainsOnly(OwnModule):
    """As in the README: there is no validation."""

    validation_step = pl.LightningModule.validation_step


class Manual(OwnModule):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__(manual=1)


class _Router(nn.Module):
    """Chooses the first of three experts, as good as the second in its first call alone."""

    top_k = 1

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.tensor([[1.0, 1.0, 0.0]])

    def forward(self) -> Any:
        given, self.logits = self.logits, torch.tensor([[1.0, 0.0, 0.0]])
        return given, None


class RoutesOnce(OwnModule):
    """Asks a router, and goes on without it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.router()
        return super().training_step(batch, batch_idx)
