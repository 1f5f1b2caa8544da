"""The plain reference in fp32: one process, one document at a time, no sharding, no exchange, nothing packed.

A module that offers a ``plain_twin()`` is compared with it: for Hugging Face models that is transformers' own eager
attention and plain cross entropy. Any other module is its own reference, run by an ordinary Trainer on documents alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_longctx.batch import PackedBatch, count_targets
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.doctor.cases import document_rows
from lightning_longctx.tools.doctor.fits import Rows, fresh, make_trainer, whole

__all__ = ["PlainTwin", "Reference", "ReferenceStep"]


class PlainTwin(Protocol):
    """A model that computes the loss of a row's documents without any part of this suite."""

    def row_loss(self, row: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the sum of the row's loss terms with its graph, and the loss of each token ``[T]``, detached."""

    def named_parameters(self) -> Any:
        """Parameters by the names that they have in the module."""


@dataclass(frozen=True)
class ReferenceStep:
    """What a step should give.

    Attributes:
        loss: the mean of the token losses over its targets.
        gradients: by parameter name.
        margin: smallest gap between the last chosen and the first rejected expert's probability; infinite without any.
    """

    loss: float
    gradients: dict[str, Tensor]
    margin: float


class Reference:
    """The reference of a module, kept for several questions.

    Args:
        template: never given to a Trainer itself.
    """

    def __init__(self, template: pl.LightningModule) -> None:
        self._template = template
        module = fresh(template)
        twin = getattr(module, "plain_twin", None)
        self._twin: PlainTwin | None = twin() if callable(twin) else None

    def steps(self, steps: Sequence[Sequence[PackedBatch]]) -> list[ReferenceStep]:
        """What each step of whole rows should give."""
        if self._twin is None:
            return self._own_steps(steps)
        return [self._twin_step(self._twin, rows) for rows in steps]

    def token_losses(self, rows: Sequence[PackedBatch]) -> list[Tensor]:
        """The loss of each token of each whole row, ``[T]``."""
        if self._twin is not None:
            with torch.no_grad():
                return [self._twin.row_loss(row)[1] for row in rows]
        documents = [document for row in rows for document in document_rows(row)]
        losses = iter(_own_token_losses(fresh(self._template), documents))
        return [torch.cat([next(losses) for _ in document_rows(row)]) for row in rows]

    @staticmethod
    def _twin_step(twin: PlainTwin, rows: Sequence[PackedBatch]) -> ReferenceStep:
        assert isinstance(twin, nn.Module)
        twin.zero_grad()
        targets = sum(int(count_targets(row)) for row in rows)
        total = 0.0
        with routing_margin(twin) as margin:
            for row in rows:
                loss, per_token = twin.row_loss(row)
                (loss / targets).backward()
                total += float(per_token.double().sum())
        gradients = {name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None}
        return ReferenceStep(total / targets, gradients, margin[0])

    def _own_steps(self, steps: Sequence[Sequence[PackedBatch]]) -> list[ReferenceStep]:
        """One fit with a micro-batch and a step for each document; sums of documents make the steps asked for."""
        documents = [[part for row in rows for part in document_rows(row)] for rows in steps]
        collect = _Documents()
        module = fresh(self._template)
        flat = [document for part in documents for document in part]
        trainer = make_trainer(SingleDeviceStrategy("cpu"), 1, 1, len(flat), collect)
        module.train_dataloader = lambda: Rows(flat)  # type: ignore[method-assign]
        module.val_dataloader = lambda: []  # type: ignore[method-assign]
        collect.ends = torch.tensor([len(part) for part in documents]).cumsum(0).tolist()
        with routing_margin(module) as collect.margin:
            trainer.fit(module)
        return collect.done


class _Documents(Callback):
    """Sums gradients and losses of single documents up to those of a step: each is its loss times ``loss_divisor``."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.done: list[ReferenceStep] = []
        self.margin = [float("inf")]  # of the step that is under way
        self._total, self._targets, self._number, self._divisor = 0.0, 0, 0, 1
        self._sums: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *args: Any) -> None:
        self._targets += int(count_targets(batch))
        self._divisor = batch["loss_divisor"]

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self._sums[name] = self._sums.get(name, 0) + whole(parameter.grad) * self._divisor

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self._total += float(_per_token(outputs).double().sum())
        self._number += 1
        if self._number in self.ends:
            gradients = {name: value / self._targets for name, value in self._sums.items()}
            self.done.append(ReferenceStep(self._total / self._targets, gradients, self.margin[0]))
            self.margin[0] = float("inf")
            self._total, self._targets, self._sums = 0.0, 0, {}


class _TokenLosses(Callback):
    """Keeps the loss of each token of each batch in evaluation."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(_per_token(outputs)[0].detach().clone())


def _own_token_losses(module: pl.LightningModule, rows: Sequence[PackedBatch]) -> list[Tensor]:
    keep = _TokenLosses()
    trainer = make_trainer(SingleDeviceStrategy("cpu"), 1, 1, len(rows), keep)
    module.train_dataloader = lambda: Rows(rows)  # type: ignore[method-assign]
    module.val_dataloader = lambda: []  # type: ignore[method-assign]
    trainer.fit(module)
    return keep.losses


def _per_token(outputs: Any) -> Tensor:
    found = outputs.get("per_token_loss") if isinstance(outputs, dict) else None
    if not isinstance(found, Tensor):
        raise ConfigurationError(
            "training_step",
            "must return a dict with `loss` and `per_token_loss` to be compared",
            type(outputs).__name__,
            "Return {'loss': out.loss, 'per_token_loss': out.per_token_loss} with out = causal_lm_loss(...).",
        )
    return found


@contextmanager
def routing_margin(module: nn.Module) -> Any:
    """Watch routers: the smallest gap between the last chosen and the first rejected expert's probability.

    A router is a module with an int ``top_k`` whose output begins with logits ``[tokens, experts]``, as transformers
    has them.

    Yields:
        A list of one float, infinite until a router ran.
    """
    smallest = [float("inf")]

    def watch(router: Any, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else None
        if isinstance(logits, Tensor) and logits.dim() == 2 and logits.shape[1] > router.top_k:
            best = logits.detach().float().softmax(-1).topk(router.top_k + 1, dim=-1).values
            smallest[0] = min(smallest[0], float((best[:, -2] - best[:, -1]).min()))

    routers = [child for child in module.modules() if isinstance(getattr(child, "top_k", None), int)]
    handles = [router.register_forward_hook(watch) for router in routers]
    try:
        yield smallest
    finally:
        for handle in handles:
            handle.remove()
