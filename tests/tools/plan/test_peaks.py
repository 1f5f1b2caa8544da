"""A simulated peak is the one of a real run, and two short models tell that of a long one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset

from lightning_longctx import ConfigurationError
from lightning_longctx.integrations import CausalLMModule
from lightning_longctx.strategies import LongContextFSDPStrategy, tiled_mlp
from lightning_longctx.tools.plan import step as step_module
from lightning_longctx.tools.plan.peaks import phase_peaks
from lightning_longctx.tools.plan.shell import group_experts
from lightning_longctx.tools.plan.step import Step
from lightning_longctx.tools.plan.storages import StorageCounter
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.parity.rows import VOCABULARY
from tests.strategies.own_model import OwnModule
from tests.tools.plan.helpers import TINY, own_shapes, settings, shapes

TOKENS = 2048
SHALLOW = {**TINY, "num_hidden_layers": 3}
ALL_HEADS = {**SHALLOW, "num_key_value_heads": 8}


class Rows(IterableDataset):
    """Three rows of one document."""

    def __iter__(self):
        for _ in range(3):
            ids = torch.arange(TOKENS)[None] * 7 % 256
            yield {
                "input_ids": ids,
                "shift_labels": torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1),
                "position_ids": torch.arange(TOKENS)[None],
                "source_ids": torch.zeros(1, TOKENS, dtype=torch.int64),
                "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
                "max_seqlen": TOKENS,
                "document_keys": torch.zeros(1, 2, dtype=torch.int64),
                "loss_divisor": TOKENS,
            }


class LastStep(pl.Callback):
    """Notes when the third step begins."""

    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._note()


def train(config: dict[str, Any], switches: dict[str, Any], devices: int, note: Callable[[], None]) -> None:
    """Three real steps."""
    trainer = quiet_trainer(
        devices=devices,
        max_steps=3,
        strategy=LongContextFSDPStrategy(**switches),
        callbacks=[LastStep(note)],
        limit_val_batches=0,
    )
    loader = DataLoader(Rows(), batch_size=None)
    trainer.fit(CausalLMModule(config=config), loader, loader)


def allocated_peak(config: dict[str, Any], switches: dict[str, Any]) -> int:
    """Bytes that PyTorch's allocator of host memory had given out at most in the third step."""
    began: list[int] = []
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()  # before the model is made: what was allocated earlier is not seen
    train(config, switches, 1, lambda: began.append(time.time_ns()))
    profiler.stop()
    found: list[tuple[int, int, int]] = []  # when, bytes given out until then, bytes given out now

    def walk(events: Any) -> None:
        for event in events:
            if event.name == "[memory]":
                found.append((event.start_time_ns, event.typed[1].total_allocated, event.typed[1].alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    _, total, size = min(found)
    before = total - size  # PyTorch still counts what an earlier profile saw, in the same process
    return max(total for when, total, _ in found if when >= began[0]) - before


def counted_peak(config: dict[str, Any], switches: dict[str, Any], devices: int) -> int:
    """Bytes of all storages that lived at once in the third step; without what gloo copies inside."""
    with StorageCounter() as counter:
        train(config, switches, devices, lambda: counter.mark("third step"))
    return counter.segments[-1].peak


@pytest.mark.distributed
@pytest.mark.parametrize("config", [SHALLOW, ALL_HEADS], ids=["shared heads", "all heads"])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_the_peak_is_that_of_a_real_run(config: dict[str, Any], mode: str) -> None:
    switches = {"activation_checkpointing": mode}
    (measured,) = run_ranks(allocated_peak, 1, config, switches)
    found = phase_peaks(shapes(config), settings(**switches), Step(TOKENS, on_gpu=False))
    assert found.peak == pytest.approx(measured, rel=0.003)


@pytest.mark.distributed
def test_the_peak_is_that_of_real_ranks() -> None:
    switches = {"activation_checkpointing": "full", "sequence_parallel_size": 2}
    measured = run_ranks(counted_peak, 2, SHALLOW, switches, 2)
    found = phase_peaks(shapes(SHALLOW), settings(world_size=2, **switches), Step(TOKENS, on_gpu=False))
    assert [found.peak / one for one in measured] == pytest.approx([1, 1], rel=0.01)


@pytest.mark.distributed
def test_the_peak_with_tiles_is_that_of_a_real_run() -> None:
    switches = {"activation_checkpointing": "full", "tiled_mlp": {"tiles": 4}}
    (measured,) = run_ranks(allocated_peak, 1, SHALLOW, switches)
    found = phase_peaks(shapes(SHALLOW), settings(**switches), Step(TOKENS, on_gpu=False))
    assert found.peak == pytest.approx(measured, rel=0.005)


@pytest.mark.slow
def test_a_few_tiles_tell_what_all_need(monkeypatch: pytest.MonkeyPatch) -> None:
    module, step = shapes({**SHALLOW, "intermediate_size": 8192}), Step(256, "bf16-true")  # gradients set the peak
    wanted = settings(module, tiled_mlp={"tiles": 9})
    few = phase_peaks(module, wanted, step)
    monkeypatch.setattr(step_module, "_few_tiles", tiled_mlp._tiles)
    assert [(p.name, p.peak, p.parts) for p in phase_peaks(module, wanted, step).phases] == [
        (p.name, p.peak, p.parts) for p in few.phases
    ]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    {"activation_checkpointing": "selective", "sequence_parallel_size": 4},
    {"sharding": {"prefetch": 2}},
    {"sharding": {"reshard_after_forward": False}},
    {"sharding": {"reduce_gradients": "last_micro_batch"}},
]
OFFLOADED: list[dict[str, Any]] = [
    {"activation_checkpointing": "full", "activation_offload": {"mode": "async", "min_tensor_mib": 0}},
    {"activation_checkpointing": "full", "activation_offload": "sync", "tiled_mlp": "auto"},
]


@pytest.mark.slow
@pytest.mark.parametrize("switches", [*VARIANTS, *OFFLOADED], ids=str)
def test_two_depths_tell_what_all_blocks_need(switches: dict[str, Any]) -> None:
    late = switches.get("sharding", {}).get("reduce_gradients") == "last_micro_batch"
    module, step = shapes(), Step(4096, "bf16-true", accumulate=2 if late else 1)
    wanted = settings(module, 4, **switches)
    short, whole = (phase_peaks(module, wanted, step, whole=whole) for whole in (False, True))
    assert [(p.name, p.peak, p.host) for p in short.phases] == [(p.name, p.peak, p.host) for p in whole.phases]
    assert [{k: v for k, v in p.parts.items() if v} for p in short.phases] == [
        {k: v for k, v in p.parts.items() if v} for p in whole.phases
    ]
    assert (short.largest, short.binding) == (whole.largest, whole.binding)


def test_parts_of_a_sharded_model_by_hand() -> None:
    module = shapes(SHALLOW)
    count = sum(parameter.numel() for parameter in module.parameters())
    found = phase_peaks(module, settings(module, 4), Step(1024))
    forward = found.phases[0]
    assert forward.name == "forward"
    assert forward.parts["parameters"] == pytest.approx(4 * count / 4, rel=0.01)  # and buffers
    assert forward.parts["gradients"] == pytest.approx(forward.parts["parameters"], rel=0.01), "of the last step"
    assert forward.parts["optimizer"] == pytest.approx(2 * forward.parts["parameters"], rel=0.01)
    for phase in found.phases:
        assert sum(phase.parts.values()) == phase.peak


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "accumulate"), [("32-true", 1), ("bf16-mixed", 2)])
def test_offloaded_parameters_are_on_the_host_and_the_rest_stays(precision: str, accumulate: int) -> None:
    module, step = shapes(SHALLOW), Step(1024, precision, accumulate)
    shard = sum(parameter.numel() for parameter in module.parameters())  # bytes, on four ranks
    plain, moved = (
        phase_peaks(module, settings(module, 4, sharding={"offload_parameters": offload}), step)
        for offload in (False, True)
    )
    assert moved.host == pytest.approx(4 * shard, rel=0.1)  # weights, gradients, two states; and what a step needs
    for before, after in zip(plain.phases, moved.phases, strict=True):
        assert after.parts["optimizer"] == 0
        assert after.parts["parameters"] < 0.1 * before.parts["parameters"]  # buffers
        assert after.parts["activations"] == pytest.approx(before.parts["activations"], rel=0.1)
    assert moved.phases[0].parts["gradients"] == 0, "of the last step"
    assert moved.phases[-1].peak < 0.1 * plain.phases[-1].peak


def test_accumulation_keeps_gradients_through_backward() -> None:
    module = shapes(SHALLOW)
    once, several = (phase_peaks(module, settings(module), Step(256, accumulate=count)) for count in (1, 2))
    assert several.phases[2].parts["gradients"] > once.phases[2].parts["gradients"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_gradients_that_the_last_micro_batch_reduces_are_whole_until_then(precision: str) -> None:
    module = shapes({**SHALLOW, "num_hidden_layers": 1})
    wanted = settings(module, 4, sharding={"reduce_gradients": "last_micro_batch"})
    once, several = (phase_peaks(module, wanted, Step(256, precision, count)) for count in (1, 2))
    whole = 4 * sum(parameter.numel() for parameter in module.parameters())  # bytes, whatever the precision
    assert several.phases[0].parts["gradients"] == pytest.approx(whole, rel=0.01)
    for before, after in zip(once.phases[:2], several.phases[:2], strict=True):
        assert after.peak - before.peak == pytest.approx(whole - before.parts["gradients"], rel=0.01)
    assert several.phases[-1] == once.phases[-1]


def test_a_module_of_ones_own() -> None:
    found = phase_peaks(own_shapes(OwnModule), settings(world_size=2, sequence_parallel_size=2), Step(512))
    assert found.phases[-1].name == "optimizer"
    assert found.phases[0].parts["exchange"] > 0
    assert found.largest[0] >= 256 * VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_experts(precision: str) -> None:
    module = shapes("tiny-qwen3-moe")
    found = phase_peaks(module, settings(module, 2), Step(1024, precision))
    count = sum(parameter.numel() for parameter in module.parameters())
    assert found.phases[0].parts["parameters"] == pytest.approx(4 * count / 2, rel=0.02)


@pytest.mark.slow
def test_experts_one_by_one_are_simulated_as_grouped_products() -> None:
    grouped, eager = shapes("tiny-qwen3-moe"), shapes("tiny-qwen3-moe")
    eager.model.set_experts_implementation("eager")
    assert group_experts(eager)
    assert not group_experts(grouped)
    assert not group_experts(shapes(SHALLOW))
    peaks = [phase_peaks(module, settings(module, 2), Step(512)).peak for module in (grouped, eager)]
    assert peaks[0] == peaks[1]


class ReadsItsLoss(OwnModule):
    """As many do, for a log of their own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        assert output["loss"].item() == 1
        return output


def test_a_loss_that_is_read_does_not_matter() -> None:
    plain, reading = (phase_peaks(own_shapes(make), settings(), Step(64)).peak for make in (OwnModule, ReadsItsLoss))
    assert plain == reading


class Looks(OwnModule):
    """Its work depends on values."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * batch["input_ids"].max().item()


def test_a_step_that_looks_at_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must run without looking at values") as raised:
        phase_peaks(own_shapes(Looks), settings(), Step(64))
    assert "_local_scalar_dense" in str(raised.value)


def test_nothing_is_left_behind() -> None:
    module = shapes(SHALLOW)
    before = [(name, value.device.type, value.dtype) for name, value in module.named_parameters()]
    resize, attention = torch.UntypedStorage.resize_, torch.nn.functional.scaled_dot_product_attention
    phase_peaks(module, settings(module, 2, activation_checkpointing="full"), Step(256, "bf16-true"))
    assert [(name, value.device.type, value.dtype) for name, value in module.named_parameters()] == before
    assert torch.UntypedStorage.resize_ is resize
    assert torch.nn.functional.scaled_dot_product_attention is attention
    assert not torch.distributed.is_initialized()
