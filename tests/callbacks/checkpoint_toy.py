"""A run that remembers what it did, for comparing a broken one with an unbroken one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longctx import (
    AsyncDCPCheckpoint,
    CheckpointOptions,
    DynamicBatchingDataModule,
    LongContextFSDPStrategy,
    causal_lm_loss,
    ulysses_attention,
)

DOCUMENTS = [{"text": f"document {n} " + "word " * (n % 9)} for n in range(120)]


class Recorder(pl.LightningModule):
    """Attention with dropout, so that random numbers matter; notes loss and documents of each micro-batch."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = parts
        self.embedding = nn.Embedding(257, 32)
        self.block = nn.Linear(32, 32)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 257, bias=False)
        self.register_buffer("steps_seen", torch.zeros(1))
        if parts.get("unused"):
            self.unused = nn.Linear(4, 4)
        if parts.get("tied"):
            self.head.weight = self.embedding.weight
        if parts.get("frozen"):
            self.embedding.requires_grad_(False)
        self.notes: list[tuple[float, list[list[int]]]] = []

    def _loss(self, batch: Any) -> Any:
        x = self.embedding(batch["input_ids"])
        q = self.block(x).unflatten(-1, (4, 8)).transpose(1, 2)  # [1, 4, T/S, 8]
        x = x + self.dropout(ulysses_attention(q, q, q, batch).transpose(1, 2).flatten(2))
        return causal_lm_loss(x, self.head.weight, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps_seen += 1
        out = self._loss(batch)
        self.notes.append((float(out.loss.detach()), batch["document_keys"].tolist()))
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(1)  # validation that draws random numbers
        self.log("val/loss", self._loss(batch).mean, sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        if self.parts.get("stepping"):
            assert self.trainer.estimated_stepping_batches
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            return None
        optimizer = self.parts.get("optimizer", torch.optim.AdamW)(trained, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def full(value: Any) -> Any:
    """A tensor as every rank can compare it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def fit(
    folder: str | Path,
    max_steps: int,
    ckpt_path: str | None = None,
    strategy: Any = "auto",
    devices: int = 1,
    accumulate: int = 1,
    checkpoint: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    module: pl.LightningModule | None = None,
    parts: dict[str, Any] | None = None,
    sp: int | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Train, and return everything that a resume must restore."""
    pl.seed_everything(1, verbose=False)
    callback = AsyncDCPCheckpoint(
        folder, **{"every_n_train_steps": 5, **(checkpoint or {})}, options=CheckpointOptions(**(options or {}))
    )
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings |= {"accelerator": "cpu", "devices": devices, "max_steps": max_steps, "num_sanity_val_steps": 0, **trainer}
    callbacks = [*settings.pop("callbacks", []), callback]
    chosen = LongContextFSDPStrategy(sequence_parallel_size=sp) if sp is not None else strategy
    run = pl.Trainer(strategy=chosen, callbacks=callbacks, accumulate_grad_batches=accumulate, **settings)
    module = module or Recorder(**(parts or {}))
    source = DynamicBatchingDataModule(**{"sources": {"a": DOCUMENTS}, "max_seq_len": 64, **(data or {})})
    run.fit(module, source, ckpt_path=ckpt_path)
    optimizer = run.optimizers[0] if run.optimizers else None
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = optimizer.state if optimizer is not None else {}
    return {
        "step": run.global_step,
        "epoch": run.current_epoch,
        "weights": {key: full(value) for key, value in module.state_dict().items()},
        "optimizer": {names[p]: {key: full(value) for key, value in entry.items()} for p, entry in state.items()},
        "rate": optimizer.param_groups[0]["lr"] if optimizer is not None else None,
        "notes": module.notes,
    }


def assert_same(one: dict[str, Any], other: dict[str, Any], exact: bool = True) -> None:
    """Compare weights, optimizer, learning rate and counts."""
    assert one["step"] == other["step"]
    assert one["rate"] == other["rate"]
    for key, value in one["weights"].items():
        _close(key, value, other["weights"][key], exact)
    assert one["optimizer"].keys() == other["optimizer"].keys()
    for name, entry in one["optimizer"].items():
        for key, value in entry.items():
            _close(f"{name}.{key}", value, other["optimizer"][name][key], exact)


def _close(key: str, one: Any, other: Any, exact: bool) -> None:
    if not isinstance(one, Tensor):
        assert one == other, key
        return
    same = torch.equal(one, other) if exact else torch.allclose(one, other, atol=1e-6)
    assert same, f"{key} differs by {(one - other).abs().max()}"
