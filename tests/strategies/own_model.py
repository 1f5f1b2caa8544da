"""A LightningModule as a user would write it: own attention, nothing of Hugging Face."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_longctx import causal_lm_loss, topology_of, ulysses_attention
from tests.parity.rows import VOCABULARY, Rows


class Block(nn.Module):
    """Attention without positions, and a residual."""

    def __init__(self, width: int, heads: int, exchanges: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.exchanges = heads, exchanges

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        # [1, T, 3 * width] -> three of [1, H, T, D]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.exchanges:
            attended = ulysses_attention(q, k, v, batch)
        else:
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class OwnModule(pl.LightningModule):
    """Embedding, blocks, head; returns what ``output`` says."""

    def __init__(
        self, rows: int = 8, heads: int = 4, exchanges: bool = True, output: str = "exact", **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(options.get("seed", 0))
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block(16, heads, exchanges) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.rows, self.output, self.options = rows, output, options
        self.automatic_optimization = not options.get("manual", 0)

    def loss_of(self, batch: Any) -> Any:
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = block(x, batch)
        return causal_lm_loss(x, self.head.weight, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for block in self.blocks:
            block.exchanges &= batch_idx < self.options.get("exchanges until", 10**9)
        out = self.loss_of(batch)
        if not self.automatic_optimization:
            return self._manual(out, batch_idx)
        if self.output == "mean only":
            return out.mean + 0 * out.loss
        loss = out.loss * 2 if self.output == "wrong loss" else out.loss
        return {"loss": loss, "per_token_loss": out.per_token_loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"per_token_loss": self.loss_of(batch).per_token_loss}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch).mean

    def _manual(self, out: Any, batch_idx: int) -> Any:
        self.manual_backward(out.loss)
        if (batch_idx + 1) % 2 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": out.loss.detach(), "per_token_loss": out.per_token_loss}

    def configure_optimizers(self) -> Any:
        count = max(1, self.options.get("manual", 1))
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(count)]

    def train_dataloader(self) -> Any:
        topology = topology_of(self.trainer)
        if self.options.get("own rows"):
            return Rows(topology.rank, topology.world_size, self.rows)
        return Rows(topology.dp_rank, topology.dp_size, self.rows)

    val_dataloader = train_dataloader
    predict_dataloader = train_dataloader
