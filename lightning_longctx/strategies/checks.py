"""What is refused before any process is started, and what is compared between processes before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import (
    Callback,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.agreement import package_versions, stable_text
from lightning_longctx.strategies.mesh import node_crossings
from lightning_longctx.units import counted

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies.strategy import Strategy

    from lightning_longctx.strategies.fsdp2 import LongContextFSDPStrategy

__all__ = [
    "CheckingLauncher",
    "check_callbacks",
    "check_manual_optimization",
    "check_parts",
    "check_sharded_before",
    "data_facts",
    "run_facts",
    "warn_of_crossings",
]

# Where a sharded module keeps the settings that it was sharded with.
_SHARDED_WITH = "_longctx_sharded_with"

# Settings of the Trainer that change how ranks meet.
_TRAINER_SETTINGS = ("precision", "max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val")

# Callbacks of Lightning that would fail in the middle of a run, hang it, or tell something wrong: rule and remedy.
_REFUSED_CALLBACKS: tuple[tuple[tuple[type[Callback], ...], str, str], ...] = (
    (
        (StochasticWeightAveraging, WeightAveraging),
        "must not copy the module: FSDP2 modules cannot be deep-copied, and no rank could hold the copy",
        "Leave it out, and average saved checkpoints after the run.",
    ),
    (
        (ModelPruning,),
        "must not mask parameters one by one: each rank holds a shard of them",
        "Leave it out, and prune the exported model.",
    ),
    (
        (OnExceptionCheckpoint,),
        "must not save when one rank fails: a save of shards would wait for the others, which wait for this one",
        "Use AsyncDCPCheckpoint: the last complete checkpoint is found, whatever ended the run.",
    ),
    (
        (ThroughputMonitor,),
        "must not take the rows of one rank for those of all, nor the peak of float32 for that of bfloat16",
        "Use TrainingMetrics, which counts the tokens and operations of all ranks.",
    ),
)


def check_callbacks(callbacks: list[Callback], strategy: Strategy) -> None:
    """Refuse callbacks that cannot work on sharded modules, and ask the others.

    Args:
        callbacks: the Trainer's own list, from which a refused one is taken: one that saves on exceptions would answer
            its refusal with a save. One with a method ``check_strategy(strategy)`` is asked.
        strategy: the running one.

    Raises:
        ConfigurationError: a callback of Lightning that cannot be right on shards, or one that refuses the strategy.
    """
    for callback in list(callbacks):
        for kinds, rule, fix in _REFUSED_CALLBACKS:
            if isinstance(callback, kinds):
                callbacks.remove(callback)
                raise ConfigurationError("trainer.callbacks", rule, type(callback).__name__, fix)
        check = getattr(callback, "check_strategy", None)
        if callable(check):
            check(strategy)


def check_manual_optimization(module: pl.LightningModule, strategy: LongContextFSDPStrategy) -> None:
    """Refuse what cannot be right when the module runs backward and the optimizer by itself.

    Raises:
        ConfigurationError: several optimizers, or gradients that are reduced in the last micro-batch only.
    """
    if module.automatic_optimization:
        return
    if len(strategy.optimizers) > 1:
        raise ConfigurationError(
            "configure_optimizers",
            "must return one optimizer in manual optimization (the targets of a step belong to one update)",
            f"{len(strategy.optimizers)} optimizers",
            "Use one optimizer with several parameter groups.",
        )
    if strategy.sharding.reduce_gradients == "last_micro_batch":
        raise ConfigurationError(
            "strategy.sharding.reduce_gradients",
            "must be every_micro_batch in manual optimization (which micro-batch is the last is not known)",
            strategy.sharding.reduce_gradients,
            "Leave it out.",
        )


def check_parts(strategy: object, processes: int, parts: Iterable[object]) -> None:
    """Ask the parts of a run for what they know to be wrong, while one process still speaks for all.

    Asked are those with a method ``check`` that takes ``sp_size`` and any of ``dp_size``, ``max_seq_len`` and
    ``vocab_size``: data modules and models of this package. Parts without it, such as other people's, are not checked.

    Args:
        strategy: asked for ``sequence_parallel_size``, or a registered name.
        processes: of the run.
        parts: any objects, the data module among them.

    Raises:
        ConfigurationError: a size that does not divide, with the arithmetic.
    """
    found = list(parts)
    data = next((part for part in found if isinstance(part, LightningDataModule)), None)
    sp_size = int(getattr(strategy, "sequence_parallel_size", 1))
    facts = {
        "sp_size": sp_size,
        "dp_size": processes // sp_size,
        "max_seq_len": getattr(data, "max_seq_len", None),
        "vocab_size": getattr(data, "vocab_size", None),
    }
    for part in found:
        check = getattr(part, "check", None)
        # By the parameters' names: somebody's own class may have a `check` that means something else.
        accepted = inspect.signature(check).parameters if callable(check) else {}
        if callable(check) and "sp_size" in accepted:
            check(**{name: value for name, value in facts.items() if name in accepted})


def run_facts(module: pl.LightningModule, strategy: LongContextFSDPStrategy) -> dict[str, object]:
    """Return what must be the same on every rank, by the name that a message uses."""
    return {
        **{f"version of {name}": text for name, text in package_versions().items()},
        "trainer.strategy": type(strategy).__name__,
        "strategy.sequence_parallel_size": strategy.sequence_parallel_size,
        **_lasting_settings(strategy),
        **{f"trainer.{name}": getattr(module.trainer, name) for name in _TRAINER_SETTINGS},
        "model": type(module).__name__,
        "the model's hyperparameters": stable_text(module.hparams),
        "data": type(_data_module(module)).__name__,
    }


def data_facts(module: pl.LightningModule) -> dict[str, object]:
    """Return what a data module says of itself in ``run_facts()``, where it has that method.

    Ranks with other rows would divide by other numbers, or read documents twice. Names depend on the data module's
    class, which :func:`run_facts` holds: compare that first.
    """
    facts: dict[str, object] = getattr(_data_module(module), "run_facts", dict)()
    return {name: stable_text(value) for name, value in facts.items()}


def _data_module(module: pl.LightningModule) -> pl.LightningDataModule | None:
    found: pl.LightningDataModule | None = getattr(module.trainer, "datamodule", None)
    return found


def _lasting_settings(strategy: LongContextFSDPStrategy) -> dict[str, str]:
    """Settings that sharding builds into a module, so that a later fit of it cannot change them."""
    return {
        "strategy.data_parallel_replicate_size": str(strategy.data_parallel_replicate_size),
        "strategy.activation_checkpointing": stable_text(strategy.activation_checkpointing),
        "strategy.activation_offload": stable_text(strategy.activation_offload),
        "strategy.tiled_mlp": stable_text(strategy.tiled_mlp),
        "strategy.sharding": stable_text(strategy.sharding),
    }


def check_sharded_before(module: pl.LightningModule, strategy: LongContextFSDPStrategy) -> None:
    """Refuse to run a module that was sharded with other settings: they would be without effect.

    Args:
        module: sharded; one that was sharded elsewhere passes.
        strategy: the running one.

    Raises:
        ConfigurationError: the first setting that differs.
    """
    now = {**_lasting_settings(strategy), "trainer.precision": str(strategy.precision_plugin.precision)}
    then: Mapping[str, str] = getattr(module, _SHARDED_WITH, now)
    for name, value in now.items():
        if then[name] != value:
            fix = "Build a new module for a run with other settings, and load a checkpoint of this one."
            got = f"{value} where the module was sharded with {then[name]}"
            raise ConfigurationError(name, "must stay as it was when the module was sharded", got, fix)
    setattr(module, _SHARDED_WITH, now)


def warn_of_crossings(world_size: int, sequence_parallel_size: int, ranks_per_node: int) -> None:
    """Warn, on rank 0, if ranks that share a row sit on several nodes."""
    crossing = node_crossings(world_size, sequence_parallel_size, ranks_per_node)
    if crossing:
        rank_zero_warn(
            f"{counted(len(crossing), 'sequence-parallel group')}, the first of ranks {crossing[0]}, on several nodes:"
            " the exchanges of every layer wait for the network. Let `sequence_parallel_size` divide `devices`"
            f" ({ranks_per_node}). `longctx fit --print_layout` shows the map."
        )


class CheckingLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process per device, which first lets the run be checked in this process alone.

    Args:
        launcher: the one that Lightning would use.
        check: called with the Trainer; what it raises ends the run before a process is started.
    """

    def __init__(self, launcher: Any, check: Callable[[pl.Trainer], None]) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Check, then start the processes and call ``function``."""
        if trainer is not None:
            self._check(trainer)
            processes = trainer.num_devices * trainer.num_nodes
            check_parts(trainer.strategy, processes, [*args, *kwargs.values()])
        return super().launch(function, *args, trainer=trainer, **kwargs)
