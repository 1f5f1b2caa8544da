"""A tiny language model, packed batches with unequal numbers of targets, and a plain loop to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx.batch import IGNORE_INDEX, PAD_SOURCE_ID, PackedBatch
from lightning_longctx.loss import causal_lm_loss
from tests.helpers.trainers import quiet_trainer

VOCABULARY, HIDDEN, TOKENS, DIVISOR = 11, 6, 16, 24


def make_batch(seed: int, targets: int, padding: int = 3) -> PackedBatch:
    """A row of two documents and padding, with ``targets`` targets."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([0, 5, TOKENS - padding, TOKENS], dtype=torch.int32)
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[bounds[1:] - 1] = IGNORE_INDEX
    labels[TOKENS - padding :] = IGNORE_INDEX
    candidates = (labels != IGNORE_INDEX).nonzero().flatten()
    assert 0 <= targets <= len(candidates)
    labels[candidates[targets:]] = IGNORE_INDEX
    sources = torch.zeros(TOKENS, dtype=torch.int64)
    sources[TOKENS - padding :] = PAD_SOURCE_ID
    return PackedBatch(
        input_ids=torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator),
        shift_labels=labels[None],
        position_ids=torch.cat([torch.arange(int(length)) for length in bounds.diff()])[None],
        source_ids=sources[None],
        cu_seqlens=bounds,
        max_seqlen=int(bounds.diff().max()),
        document_keys=torch.tensor([[0, 0], [0, 1], [-1, -1]]),
        loss_divisor=DIVISOR,
    )


class _Stream(IterableDataset[Any]):
    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """A loader of given batches, without a length, like the ones of packed data."""
    return DataLoader(_Stream(batches), batch_size=None)


class ToyModel(nn.Module):
    """Embedding and head: enough for gradients that depend on every token."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [1, T, H]."""
        return self.embedding(tokens).tanh()


class ToyLM(LightningModule):
    """Language model on packed batches; keeps the gradients that its optimizer sees.

    Args:
        per_token: whether steps return ``per_token_loss``.
    """

    def __init__(self, per_token: bool = True, lr: float = 0.5) -> None:
        super().__init__()
        self.model = ToyModel()
        self.per_token = per_token
        self.lr = lr
        self.seen_gradients: list[list[Tensor]] = []

    def _step(self, batch: Any) -> dict[str, Tensor]:
        if not self.per_token:
            return {"loss": _mean_loss(self.model, [batch])}
        out = causal_lm_loss(self.model(batch["input_ids"]), self.model.head.weight, batch)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._step(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._step(batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen_gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def _mean_loss(model: ToyModel, batches: Iterable[Any]) -> Tensor:
    """The token mean over batches, by PyTorch's own cross entropy on whole logits; 0 without targets."""
    logits = torch.cat([model.head(model(batch["input_ids"]))[0] for batch in batches])
    labels = torch.cat([batch["shift_labels"][0] for batch in batches])
    return F.cross_entropy(logits, labels, reduction="sum") / (labels != IGNORE_INDEX).sum().clamp(min=1)


def token_mean(batches: Iterable[Any], model: ToyModel | None = None) -> float:
    """The token mean over batches of a model (a fresh one by default)."""
    with torch.no_grad():
        return _mean_loss(model or ToyModel(), list(batches)).item()


def plain_loop(steps: Iterable[Sequence[Any]], lr: float = 0.5, clip: float | None = None) -> dict[str, list[Any]]:
    """Train on the token mean of each step's batches, in one process and without any of our parts but the model."""
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    record: dict[str, list[Any]] = {"loss": [], "gradients": [], "norm": []}
    for batches in steps:
        optimizer.zero_grad()
        loss = _mean_loss(model, batches)
        loss.backward()
        record["loss"].append(loss.item())
        record["gradients"].append([parameter.grad.detach().clone() for parameter in model.parameters()])
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        record["norm"].append(norm.item())
        optimizer.step()
    record["weights"] = [parameter.detach().clone() for parameter in model.parameters()]
    return record


class MemoryLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def column(self, key: str) -> list[float]:
        """The values of one key in order."""
        return [row[key] for _, row in self.rows if key in row]


def make_trainer(callbacks: list[Any], **settings: Any) -> Trainer:
    """A quiet trainer that logs every step to a :class:`MemoryLogger`."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "logger": MemoryLogger(),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return quiet_trainer(callbacks=callbacks, **(defaults | settings))


def run_fit(
    callbacks: list[Any],
    module: ToyLM | None = None,
    batches: Sequence[Any] = (),
    validation: Any = None,
    ckpt_path: Any = None,
    **settings: Any,
) -> Trainer:
    """Fit and return the trainer; validation only if there are loaders for it."""
    if validation is None:
        # A loader all the same: Lightning warns of a `validation_step` that has none.
        validation, settings = loader(batches), {"limit_val_batches": 0} | settings
    trainer = make_trainer(callbacks, **settings)
    trainer.fit(module or ToyLM(), loader(batches), validation, ckpt_path=ckpt_path)
    return trainer
