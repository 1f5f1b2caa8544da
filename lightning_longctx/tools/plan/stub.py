"""What a module may ask of its Trainer while it is simulated: the facts of the run, and nothing that acts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule

from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.topology import Topology

__all__ = ["attach_trainer"]

# A horizon for schedules, behind any warm-up in steps or in tokens: rates do not change memory.
_ANY_NUMBER_OF_STEPS = 10**12


def attach_trainer(module: LightningModule, settings: MemorySettings, accumulate: int, tokens: int, group: Any) -> None:
    """Let ``module.trainer`` answer, and ``module.log`` do nothing.

    Args:
        module: the module.
        settings: the layout.
        accumulate: micro-batches of a step.
        tokens: of a row.
        group: the ranks that share a row.
    """
    sp_size = settings.sequence_parallel_size
    topology = Topology(
        world_size=settings.world_size,
        dp_size=settings.world_size // sp_size,
        sp_size=sp_size,
        sp_group=group,
        ranks_averaged=settings.world_size,
    )
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(topology=topology),
        precision_plugin=SimpleNamespace(scaler=None),
        datamodule=SimpleNamespace(max_tokens_per_batch=tokens),
        callbacks=[],
        accumulate_grad_batches=accumulate,
        max_steps=_ANY_NUMBER_OF_STEPS,
        estimated_stepping_batches=_ANY_NUMBER_OF_STEPS,
        world_size=settings.world_size,
        global_rank=0,
        global_step=0,
        current_epoch=0,
        training=True,
    )
    module.trainer = trainer
    for name in ("log", "log_dict", "print"):
        setattr(module, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What is logged needs no memory to speak of."""
