"""A model of one's own under sequence parallelism: the attention call and the loss are the only lines that know of it.

Run it on two CPU processes that share each row, or on one:
    python examples/own_model.py
    python examples/own_model.py --devices 1
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_longctx import (
    DynamicBatchingDataModule,
    LongContextFSDPStrategy,
    TrainingMetrics,
    causal_lm_loss,
    ulysses_attention,
)


def rotate(x: Tensor, positions: Tensor, theta: float = 1e6) -> Tensor:
    """Rotary embedding of ``[1, H, T/S, D]`` from the positions in the documents: in float32, whatever ``x`` is."""
    width = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(width, device=x.device, dtype=torch.float32) / width)
    angles = positions[0, :, None].float() * frequencies  # [T/S, D/2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.split(width, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention with fewer key/value heads than query heads, and an MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [width, width * kv_heads // heads, width * kv_heads // heads]
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, sum(self.sizes), bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, batch: dict[str, Any]) -> Tensor:
        """``[1, T/S, width]`` to the same."""
        parts = self.qkv(self.norm1(x)).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [1, heads, T/S, D]
        q, k = rotate(q, batch["position_ids"]), rotate(k, batch["position_ids"])
        # before: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = ulysses_attention(q, k, v, batch)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class OwnModel(LightningModule):
    """Embedding, blocks, head; the loss is the exact mean over the targets of a step, in every layout."""

    def __init__(
        self, width: int = 64, layers: int = 2, heads: int = 4, kv_heads: int = 2, vocab_size: int = 264
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size  # the tokenizer `bytes` has 257 ids
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab_size, bias=False)

    def step(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The loss of a packed row, of this rank's part of it."""
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = block(x, batch)
        out = causal_lm_loss(self.norm(x), self.head.weight, batch)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """One micro-batch."""
        return self.step(batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """One row."""
        return self.step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train a few steps on the source files of Python itself and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=20)
    options = parser.parse_args()
    seed_everything(0)  # ranks start from the same weights
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=options.devices),
        max_steps=options.max_steps,
        callbacks=[TrainingMetrics()],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(OwnModel(), DynamicBatchingDataModule(sources={"code": "python-stdlib"}, max_seq_len=1024))
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['train/loss']:.6f}")


if __name__ == "__main__":
    main()
