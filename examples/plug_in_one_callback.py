"""One callback in a Lightning project that knows nothing of this package: the loss of each data set that a batch mixes.

The module, its padded batches, the Trainer and the strategy stay as they are. Three lines are new, each marked; the
second gives the callback the loss of each token beside the mean that the module returned anyway:

    python examples/plug_in_one_callback.py

Other callbacks need less: ``AsyncDCPCheckpoint`` and ``MoERouterHeatmap`` one line in ``callbacks=``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx import ChannelLoss  # new

VOCABULARY, LENGTH = 32, 24


class TwoDataSets(IterableDataset[dict[str, Tensor]]):
    """Rows of two kinds, as a project of one's own mixes them: counting up, which is easy, and chance, which is not."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(0)
        while True:
            which = int(torch.randint(2, (), generator=draw))
            start = torch.randint(VOCABULARY, (LENGTH,), generator=draw)
            ids = start if which else (start[0] + torch.arange(LENGTH)) % VOCABULARY
            labels = ids.clone()
            labels[LENGTH - 4 * which :] = -100  # rows of the second kind are shorter: padded
            yield {"input_ids": ids, "labels": labels, "dataset_id": torch.tensor(which)}


class Project(LightningModule):
    """Somebody's language model: it predicts each token from the one before it, and returns a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """One batch of rows ``[B, S]``."""
        logits = self.model(batch["input_ids"])[:, :-1].transpose(1, 2)
        labels = batch["labels"][:, 1:]
        losses = cross_entropy(logits, labels, reduction="none")
        loss = losses.sum() / (labels != -100).sum()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "per_token_loss": losses.detach()}  # new: it was `return loss`

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(steps: int = 100) -> dict[str, float]:
    """Train, and return the last loss of each data set."""
    seed_everything(0)
    channel = ChannelLoss(source_key="dataset_id", source_names=["counting", "chance"])  # new, and in `callbacks`
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[channel],
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Project(), DataLoader(TwoDataSets(), batch_size=16))
    return {name: value.loss for name, value in channel.latest.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=100)
    print({name: round(loss, 3) for name, loss in main(parser.parse_args().max_steps).items()})
