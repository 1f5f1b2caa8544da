"""One training step of a model on tensors without memory, and what it would have needed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_longctx import loss as loss_module
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies import tiled_mlp as tiled_mlp_module
from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.strategies.precision import FSDP2Precision
from lightning_longctx.strategies.shard import find_blocks, register_forward_methods, shard_module
from lightning_longctx.strategies.ulysses import set_running_exchange
from lightning_longctx.tools.plan.kernels import FakeAnswers, gpu_attention
from lightning_longctx.tools.plan.shell import (
    block_list,
    imagined_batch,
    known_bounds,
    loss_of,
    materialize,
    optimizers_of,
)
from lightning_longctx.tools.plan.storages import HOST, Segment, StorageCounter
from lightning_longctx.tools.plan.stub import attach_trainer
from lightning_longctx.tools.plan.switches import prepare_blocks
from lightning_longctx.tools.plan.world import World, imagined_layout, imagined_world

__all__ = ["Step", "Timeline", "simulate_step"]

_Turn = TypeVar("_Turn")


@dataclass(frozen=True)
class Step:
    """What is simulated, but for the memory settings.

    Attributes:
        tokens: of a whole row.
        precision: the Trainer's.
        accumulate: micro-batches of a step.
        on_gpu: whether the device is a GPU: attention then has the memory of a GPU's kernel.
    """

    tokens: int
    precision: str = "32-true"
    accumulate: int = 1
    on_gpu: bool = True


@dataclass(frozen=True)
class Timeline:
    """The segments of a step in order: ``forward`` of each block, ``loss``, ``backward`` of each block, ``optimizer``.

    Attributes:
        segments: each with its peak. A block's are named ``forward <path>`` and ``backward <path>``.
        largest: elements and shape of the largest tensor.
    """

    segments: list[Segment]
    largest: tuple[int, tuple[int, ...]]


def simulate_step(
    template: LightningModule, settings: MemorySettings, step: Step, depth: int | None = None
) -> Timeline:
    """Run a step of rank 0.

    Args:
        template: the module, on the meta device; it stays as it is.
        settings: layout and switches.
        step: the rest.
        depth: blocks to keep, of a module whose blocks are alike; None for all.

    Raises:
        ConfigurationError: a step that cannot run without values, or settings that do not fit the module.
    """
    module = copy.deepcopy(template)
    FSDP2Precision(step.precision).convert_module(module)
    if settings.has_loss_chunks:
        module.loss_chunk_tokens = settings.loss_chunk_tokens  # type: ignore[assignment]
    blocks = find_blocks(module, settings.sharding.blocks)
    if depth is not None:
        whole = block_list(module, blocks)
        assert whole is not None
        del whole[depth:]
    counter = StorageCounter("cpu", getattr(module, "vocab_size", None))
    with ExitStack() as stack:
        stack.enter_context(imagined_world(settings.world_size))
        stack.enter_context(patch.object(loss_module, "range", _few_turns, create=True))
        stack.enter_context(patch.object(tiled_mlp_module, "_tiles", _few_tiles))
        stack.callback(set_running_exchange, None)
        world = imagined_layout(settings)
        stack.enter_context(gpu_attention() if step.on_gpu else nullcontext())
        stack.enter_context(known_bounds(step.tokens))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(FakeAnswers())  # type: ignore[no-untyped-call]  # below the counter: it helps itself
        stack.enter_context(counter)
        try:
            _run(module, blocks[:depth], settings, step, world, counter)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            fix = "What its memory depends on is not known before a run: measure a short one."
            raise ConfigurationError("model", "must run without looking at values", error.func, fix) from error
    return Timeline(counter.segments[1:], counter.largest)


def _run(
    module: LightningModule,
    blocks: Sequence[nn.Module],
    settings: MemorySettings,
    step: Step,
    world: World,
    counter: StorageCounter,
) -> None:
    _shard(module, blocks, settings, step, world.mesh, counter)
    attach_trainer(module, settings, step.accumulate, step.tokens, world.row_group)
    optimizers = optimizers_of(module)
    # Between two steps there are optimizer states, and the gradients of the last one.
    with counter.filling("gradients"):
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    states = "optimizer"
    if settings.sharding.offload_parameters:
        states = HOST
        _move_shards(module, counter)
    _update(optimizers, counter, states)
    batch = imagined_batch(step.tokens, settings.sequence_parallel_size)
    if step.accumulate > 1 and settings.sharding.reduce_gradients == "last_micro_batch":
        _unreduced_micro_batch(module, optimizers, batch, counter)
    counter.mark("forward")
    loss = loss_of(module.training_step(batch, 0))
    if step.accumulate == 1:  # Lightning drops old gradients between forward and backward
        for optimizer in optimizers:
            optimizer.zero_grad()
    counter.mark("backward")
    loss.backward()
    del loss
    counter.mark("optimizer")
    _update(optimizers, counter, states)


def _unreduced_micro_batch(
    module: LightningModule, optimizers: Sequence[Optimizer], batch: Any, counter: StorageCounter
) -> None:
    """Leave whole gradients of all parameters, as micro-batches before the last one do where that one reduces them all.

    Its own segments are dropped: the last micro-batch holds the same, and these gradients from its beginning.
    """
    assert isinstance(module, FSDPModule)
    loss = loss_of(module.training_step(batch, 0))
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.set_requires_gradient_sync(False)
    loss.backward()
    module.set_requires_gradient_sync(True)
    del counter.segments[:-1]


def _shard(
    module: LightningModule,
    blocks: Sequence[nn.Module],
    settings: MemorySettings,
    step: Step,
    mesh: DeviceMesh,
    counter: StorageCounter,
) -> None:
    """What the strategy does to a module, with weights that have no memory."""
    counter.watch_blocks([name for name, child in module.named_modules() if child in set(blocks)])
    prepare_blocks(module, blocks, settings)
    policy = FSDP2Precision(step.precision).policy()
    with counter.filling("parameters"):
        shard_module(module, blocks, mesh, policy, settings.sharding, partial(materialize, module))
    _count_gradients(module, blocks, counter)
    register_forward_methods(module, ["training_step", *settings.sharding.forward_methods])
    module.train()


def _count_gradients(module: LightningModule, blocks: Sequence[nn.Module], counter: StorageCounter) -> None:
    """Count gradients of gathered weights as gradients, from when they are accumulated until they are reduced."""

    def hook(unit: nn.Module, *_: Any) -> None:
        for parameter in unit.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(note)

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            counter.count(parameter.grad, "gradients")

    original = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        hook(module)  # the root's weights are gathered here, and those of blocks are not yet
        return original(batch, batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]
    for block in blocks:
        block.register_forward_pre_hook(hook)


def _move_shards(module: nn.Module, counter: StorageCounter) -> None:
    """Count shards of parameters, and those of their gradients from when they are reduced, as FSDP2 keeps them then."""

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            counter.count(parameter.grad, HOST)

    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            counter.count(parameter, HOST)
            note(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]


def _update(optimizers: Sequence[Optimizer], counter: StorageCounter, category: str) -> None:
    with counter.filling(category):
        for optimizer in optimizers:
            optimizer.step()


def _few_turns(start: int, stop: int, chunk: int) -> Iterator[int]:
    """The first chunks of the loss and the last: those between need what they need."""
    yield from _few(range(start, stop, chunk))


def _few_tiles(x: Tensor, count: int) -> Sequence[Tensor]:
    """The first tiles of an MLP and the last."""
    return _few(x.tensor_split(count, dim=-2))


def _few(turns: Sequence[_Turn]) -> Sequence[_Turn]:
    return turns if len(turns) <= 4 else (turns[0], turns[1], turns[2], turns[-1])
