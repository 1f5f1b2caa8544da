"""Give more weight to the sources on which the model has most left to learn, while it trains.

Group DRO over data sources, as DoReMi does it (Xie et al. 2023, arXiv 2305.10429, algorithm 1), with the values that
``ChannelLoss`` has anyway. A source's excess is its loss minus that of a reference model (or a loss you aim at); the
weights grow by a factor ``exp(step_size x excess)``, are normalised, and mixed with a little of the uniform mix:

    python examples/reweight_by_loss.py

trains a tiny model on Python's standard library and on package descriptions, and prints the weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_longctx import CausalLMModule, ChannelLoss, DynamicBatchingDataModule, ExactTokenMean
from lightning_longctx.integrations import OptimizerSettings


def new_weights(
    weights: Mapping[str, float],
    losses: Mapping[str, float],
    reference: Mapping[str, float],
    step_size: float,
    uniform: float,
) -> dict[str, float]:
    """One step of exponentiated gradient on the mix.

    Args:
        weights: the mix so far, by source; they add up to 1.
        losses: losses by source; a source without one keeps its share against the others.
        reference: losses to aim at; 0 for a source that is missing.
        step_size: how fast the mix follows the losses.
        uniform: share of the uniform mix in the result, so that no source dies out.

    Returns:
        The new mix; adds up to 1.

    Example:
        >>> mix = new_weights({"a": 0.5, "b": 0.5}, {"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 2.0}, 1.0, 0.1)
        >>> {name: round(weight, 3) for name, weight in mix.items()}
        {'a': 0.708, 'b': 0.292}
    """
    excess = {name: max(losses[name] - reference.get(name, 0.0), 0.0) if name in losses else 0.0 for name in weights}
    grown = {name: weight * math.exp(step_size * excess[name]) for name, weight in weights.items()}
    total = sum(grown.values())
    return {name: (1 - uniform) * value / total + uniform / len(grown) for name, value in grown.items()}


class ReweightByLoss(Callback):
    """Sets the weights of the data module's sources after each logged step. In any order among other callbacks.

    ``ChannelLoss.latest`` is equal on all ranks, so all ranks set the same weights.

    Args:
        channel: the callback that measures.
        reference: losses to aim at by source, such as those of a small model trained on the uniform mix.
        step_size: DoReMi's is 1.
        uniform: DoReMi's is 1e-3.
    """

    def __init__(
        self, channel: ChannelLoss, reference: Mapping[str, float], step_size: float = 1.0, uniform: float = 1e-3
    ) -> None:
        self.channel, self.reference = channel, dict(reference)
        self.step_size, self.uniform = step_size, uniform
        self.weights: dict[str, float] = {}
        self._seen: Any = channel.latest

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start from the uniform mix."""
        names = trainer.datamodule.source_names  # type: ignore[attr-defined]
        self.weights = self.weights or {name: 1 / len(names) for name in names}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Follow the newest losses."""
        if self.channel.latest is self._seen:
            return
        self._seen = self.channel.latest
        losses = {name: value.loss for name, value in self.channel.latest.items()}
        self.weights = new_weights(self.weights, losses, self.reference, self.step_size, self.uniform)
        trainer.datamodule.set_source_weights(self.weights)  # type: ignore[attr-defined]


def main(steps: int = 40) -> dict[str, float]:
    """Train and return the final mix."""
    channel = ChannelLoss(every_n_steps=4, average_over="interval")
    reweight = ReweightByLoss(channel, reference={"code": 2.0, "prose": 2.0}, step_size=0.2)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[ExactTokenMean(), channel, reweight],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = DynamicBatchingDataModule(
        sources={"code": "python-stdlib", "prose": "package-metadata"}, max_seq_len=512, tokenizer="bytes"
    )
    trainer.fit(CausalLMModule(config="tiny-llama", optimizer=OptimizerSettings(lr=3e-3)), data)
    return reweight.weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=40)
    print({name: round(weight, 3) for name, weight in main(parser.parse_args().max_steps).items()})
