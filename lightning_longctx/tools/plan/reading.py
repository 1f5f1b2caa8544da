"""From a configuration to what is simulated: the module by its shapes, the layout and the switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_longctx.datamodules.settings import PackingSettings
from lightning_longctx.datamodules.sizes import row_budget
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies import LongContextFSDPStrategy
from lightning_longctx.strategies.memory import MemorySettings, settings_of
from lightning_longctx.strategies.mesh import check_world
from lightning_longctx.strategies.ulysses import check_heads
from lightning_longctx.tools.configuration import RunConfiguration, device_count
from lightning_longctx.tools.plan.options import PlanOptions
from lightning_longctx.tools.plan.shell import group_experts
from lightning_longctx.tools.plan.step import Step

__all__ = ["Run", "read_run"]

_GROUPED = "Experts that run one by one (`experts_implementation: eager`) are simulated as grouped products."


@dataclass(frozen=True)
class Run:
    """What a configuration asks for.

    Attributes:
        template: the module, on the meta device.
        settings: layout and switches.
        step: row and precision.
        ranks_per_node: processes that share a host.
        model_class: where settings of the model are written.
        notes: what is simulated otherwise than it runs.
    """

    template: LightningModule
    settings: MemorySettings
    step: Step
    ranks_per_node: int
    model_class: str
    notes: tuple[str, ...] = ()


def read_run(configuration: RunConfiguration, options: PlanOptions) -> Run:
    """Build the module by its shapes and read the rest.

    Raises:
        ConfigurationError: another strategy, no number of devices or no length, or a setting that is not simulated.
    """
    template = _template(configuration)
    notes = (_GROUPED,) if group_experts(template) else ()
    sections = configuration.settings
    trainer: Mapping[str, Any] = sections.get("trainer") or {}
    strategy = _strategy(configuration.build("strategy"))
    per_node = options.devices or device_count(trainer.get("devices"))
    if not per_node:
        fix = "Write `--devices 8`: the machine that this is for need not be here."
        raise ConfigurationError("trainer.devices", "must be a number", repr(trainer.get("devices")), fix)
    world_size = per_node * int(trainer.get("num_nodes") or 1)
    sizes = (strategy.sequence_parallel_size, strategy.data_parallel_replicate_size)
    check_world(world_size, *sizes)
    settings = settings_of(strategy, template, world_size)
    if settings.heads is not None:
        check_heads(settings.heads, sizes[0])
    step = Step(
        _row_tokens(sections.get("data"), options.max_seq_len, sizes[0]),
        str(trainer.get("precision") or "32-true"),
        _accumulate(trainer, sections.get("data")),
        trainer.get("accelerator") != "cpu",
    )
    model: Mapping[str, Any] = sections.get("model") or {}
    return Run(template, settings, step, per_node, str(model.get("class_path", type(template).__name__)), notes)


def _template(configuration: RunConfiguration) -> LightningModule:
    try:
        with torch.device("meta"):
            template: LightningModule = configuration.build("model")
            getattr(template, "configure_shapes", template.configure_model)()
    except RuntimeError as error:  # of code that looks at values, or at a Trainer that there is not
        fix = "Let `__init__` and `configure_model` do without values of tensors and without the Trainer."
        got = " ".join(str(error).split())
        raise ConfigurationError("model", "must be built by its shapes, on the meta device", got, fix) from error
    return template


def _strategy(strategy: Any) -> LongContextFSDPStrategy:
    if strategy == "longctx_fsdp":
        strategy = LongContextFSDPStrategy()
    if not isinstance(strategy, LongContextFSDPStrategy):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        fix = "Write `trainer: {strategy: longctx_fsdp}`; what others need is not known here."
        raise ConfigurationError("trainer.strategy", "must be LongContextFSDPStrategy", name, fix)
    return strategy


def _row_tokens(data: Any, asked: int | None, sp_size: int) -> int:
    """The longest row that the data module packs."""
    section: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    arguments: Mapping[str, Any] = section.get("init_args") or {}
    length = asked or arguments.get("max_seq_len")
    if length is None:
        fix = "Write `--max-seq-len 512K`."
        raise ConfigurationError("data.max_seq_len", "must be given", "no length", fix)
    packing = PackingSettings(**{**(arguments.get("packing") or {})})
    budget = int(length) * int(arguments.get("micro_batch_size") or 1)
    rows = row_budget(packing, budget, int(length), 1).physical
    return -(-max(rows, budget) // sp_size) * sp_size


def _accumulate(trainer: Mapping[str, Any], data: Any) -> int:
    """1 or more: gradients then stay from one micro-batch to the next."""
    section: Mapping[str, Any] = data if isinstance(data, Mapping) else {}
    several = (section.get("init_args") or {}).get("global_batch_tokens") is not None
    return max(int(trainer.get("accumulate_grad_batches") or 1), 2 if several else 1)
