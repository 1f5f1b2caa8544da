"""Which switches are on, which come next, and what an error says when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_longctx.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    LongContextFSDPStrategy,
    ShardingSettings,
    TiledMLP,
)
from lightning_longctx.strategies.memory import MemorySettings, next_switches, possible_sp_sizes, settings_of
from lightning_longctx.strategies.out_of_memory import advice, explaining, is_out_of_memory
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.strategies.own_model import OwnModule

FULL = ActivationCheckpointing("full")
ALL_ON = MemorySettings(
    2, 2, activation_checkpointing=FULL, activation_offload=ActivationOffload(), tiled_mlp=TiledMLP()
)


def names(settings: MemorySettings) -> list[str]:
    return [switch.name for switch in next_switches(settings)]


def test_order_of_the_switches() -> None:
    assert names(MemorySettings(8, heads=32)) == [
        "activation_checkpointing: full",
        "sequence_parallel_size: 2",
        "sequence_parallel_size: 4",
        "sequence_parallel_size: 8",
        "activation_offload: async",
        "tiled_mlp: auto",
    ]
    wasteful = ShardingSettings(reduce_gradients="last_micro_batch", reshard_after_forward=False)
    settings = MemorySettings(8, 4, 2, FULL, wasteful, heads=12, loss_chunk_tokens=4096, has_loss_chunks=True)
    assert names(settings) == [
        "sharding.reduce_gradients: every_micro_batch",
        "sharding.reshard_after_forward: true",
        "loss_chunk_tokens: 256",
        "data_parallel_replicate_size: 1",
        "activation_offload: async",
        "tiled_mlp: auto",
    ]
    assert names(ALL_ON) == []


def test_a_switch_makes_its_change_and_no_other() -> None:
    settings = MemorySettings(8, heads=8)
    for switch in next_switches(settings):
        assert switch.settings != settings
        assert replace(switch.settings, activation_checkpointing=settings.activation_checkpointing).heads == 8
        assert switch.name not in settings.switched_on()
        assert switch.name in switch.settings.switched_on()
        (key,) = switch.changes
        assert key.startswith("trainer.strategy.init_args.")


@pytest.mark.parametrize(
    ("world", "heads", "copies", "sizes"),
    [(8, 32, 1, [1, 2, 4, 8]), (8, 12, 1, [1, 2, 4]), (8, 32, 2, [1, 2, 4]), (6, None, 1, [1, 2, 3, 6])],
)
def test_sizes_that_divide(world: int, heads: int | None, copies: int, sizes: list[int]) -> None:
    assert possible_sp_sizes(world, heads, copies) == sizes


def test_settings_of_a_strategy() -> None:
    found = settings_of(LongContextFSDPStrategy(activation_checkpointing="full"), OwnModule(), 4)
    assert (found.world_size, found.activation_checkpointing, found.has_loss_chunks) == (4, FULL, False)
    assert found.switched_on() == ["activation_checkpointing: full"]


def test_what_the_module_has_nothing_for_is_not_advised() -> None:
    strategy = LongContextFSDPStrategy()
    offered = {switch.name for switch in next_switches(settings_of(strategy, OwnModule(), 1))}
    assert offered == {"activation_checkpointing: full", "activation_offload: async"}  # its blocks have no MLPs
    with_mlp = OwnModule()
    with_mlp.blocks[0].mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    assert "tiled_mlp: auto" in names(settings_of(strategy, with_mlp, 1))

    class OneLayer(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

    assert next_switches(settings_of(strategy, OneLayer(), 1)) == []
    named = LongContextFSDPStrategy(sharding={"blocks": ["Linear"]})
    offered = {switch.name for switch in next_switches(settings_of(named, OneLayer(), 1))}
    assert offered == {"activation_checkpointing: full", "activation_offload: async"}
    own = OwnModule()
    own.blocks[0].gradient_checkpointing = True  # as Hugging Face marks its layers
    offered = {switch.name for switch in next_switches(settings_of(strategy, own, 1))}
    assert "activation_checkpointing: full" not in offered


def test_the_message() -> None:
    text = advice("forward", MemorySettings(8, 2, activation_checkpointing=FULL, heads=4))
    assert text.splitlines() == [
        "LongContextFSDPStrategy: out of memory in the forward.",
        "Switched on: `activation_checkpointing: full`, `sequence_parallel_size: 2`.",
        "Try next: `sequence_parallel_size: 4` (trainer.strategy.init_args.sequence_parallel_size).",
        "`longctx plan --config run.yaml --device-gb 80` tells what fits, without a device.",
    ]
    assert "shorten `data.max_seq_len`" in advice("backward", ALL_ON)


def test_what_does_not_make_weights_smaller_is_not_advised_for_the_optimizer() -> None:
    """No activation is left when the optimizer runs."""
    text = advice("optimizer step", MemorySettings(8, heads=4))
    assert "Try next" not in text
    assert "sharding: {offload_parameters: true}" in text
    copies = MemorySettings(8, data_parallel_replicate_size=2, heads=4)
    assert "Try next: `data_parallel_replicate_size: 1`" in advice("optimizer step", copies)
    offloaded = MemorySettings(8, sharding=ShardingSettings(offload_parameters=True))
    assert advice("optimizer step", offloaded).splitlines()[1:3] == [
        "Switched on: `sharding.offload_parameters: true`.",
        "Parameters, gradients and optimizer states alone are too much: take more or larger devices.",
    ]


def test_the_innermost_phase_tells_once_below_the_original_message() -> None:
    outer, inner = (explaining(phase, MemorySettings) for phase in ("optimizer step", "backward"))
    with pytest.raises(torch.OutOfMemoryError) as raised, outer, inner:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    lines = str(raised.value).splitlines()
    assert lines[:3] == [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "",
        "LongContextFSDPStrategy: out of memory in the backward.",
    ]
    assert str(raised.value).count("out of memory in the") == 1


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("CUDA error: misaligned address")])
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
    text = str(error)
    with pytest.raises(type(error)) as raised, explaining("forward", MemorySettings):
        raise error
    assert str(raised.value) == text


class Hungry(OwnModule):
    """Asks for more than any machine has, in one phase."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.phase == "forward":
            torch.empty(2**58, dtype=torch.uint8)
        output = super().training_step(batch, batch_idx)
        if self.phase == "backward":
            output["loss"].register_hook(lambda gradient: torch.empty(2**58, dtype=torch.uint8))
        return output

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.phase == "optimizer step":
            torch.empty(2**58, dtype=torch.uint8)


def _run_out(phase: str) -> str:
    trainer = quiet_trainer(
        max_steps=1,
        limit_val_batches=0,
        strategy=LongContextFSDPStrategy(),
    )
    try:
        trainer.fit(Hungry(phase))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.distributed
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step"])
def test_a_run_that_runs_out(phase: str) -> None:
    (text,) = run_ranks(_run_out, 1, phase)
    first, _, rest = text.partition("\n\n")
    assert "DefaultCPUAllocator" in first
    assert rest.startswith(f"LongContextFSDPStrategy: out of memory in the {phase}.\nSwitched on: nothing.")
    assert ("Try next: `activation_checkpointing: full`" in rest) == (phase != "optimizer step")
