"""Activation offload changes no bit: losses, gradients and weights of two steps, in every layout."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from lightning_longctx import LongContextFSDPStrategy
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.parity.layouts import _Module, train_layout, whole
from tests.parity.models import CONFIGS
from tests.parity.test_layouts import start_weights

pytestmark = pytest.mark.distributed

#: Levels that can act, by checkpointing.
LEVELS = {
    "none": ["boundary", "all"],
    "full": ["boundary"],
    "selective": ["boundary", "policy"],
    "every_n": ["boundary", "all"],
}
BASE = {"min_tensor_mib": 0}


def _compare(name, weights, world, sp, accumulate, checkpointing, offloads, replicas=1):
    """Train without offload, then with each; a run that moves nothing raises by itself."""
    options = {"activation_checkpointing": checkpointing, "data_parallel_replicate_size": replicas}
    expected = train_layout(name, weights, world, sp, accumulate, 2, options=options)
    different = []
    for offload in offloads:
        options["activation_offload"] = offload
        got = train_layout(name, weights, world, sp, accumulate, 2, options=options)
        equal = got["losses"] == expected["losses"]
        for part in ("gradients", "weights"):
            for key, value in expected.get(part, {}).items():
                equal &= torch.equal(got[part][key], value)
        if not equal:
            different.append(offload)
    return different, len(expected.get("gradients", {}))


def check(name, world, sp, accumulate, checkpointing, offloads, replicas=1):
    arguments = (name, start_weights(name), world, sp, accumulate, checkpointing, offloads, replicas)
    results = run_ranks(_compare, world, *arguments)
    assert [different for different, _ in results] == [[]] * world
    assert results[0][1] > 10


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sp", [1, 2])
@pytest.mark.parametrize("checkpointing", LEVELS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_offload_changes_no_bit(name, checkpointing, sp, accumulate):
    choices = itertools.product(["sync", "async"], LEVELS[checkpointing])
    offloads = [{"mode": mode, "level": level, "keep_last_blocks": 0, **BASE} for mode, level in choices]
    check(name, 2, sp, accumulate, checkpointing, offloads)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_four_ranks_replicas_and_limits(name):
    offloads = [
        {"mode": "async", "keep_last_blocks": 1, "prefetch_mib": 0, **BASE},
        {"mode": "sync", "device_limit_gib": 1e-6, "keep_last_blocks": 0, **BASE},
        {"mode": "async", "modules": ["layers.0"], "keep_last_blocks": 0, **BASE},
    ]
    check(name, 4, 2, 2, "full", offloads, replicas=2)


class _Compiled(_Module):
    """Its layers are compiled one by one: their calls."""

    def configure_model(self):
        fresh = self.model is None
        super().configure_model()
        if fresh:
            for layer in self.model.model.layers:
                self.compile_layer(layer)

    def compile_layer(self, layer):
        layer.compile(backend="aot_eager")


class _CompiledInside(_Compiled):
    """What is computed again is compiled; a compiled call is refused with recompute."""

    def compile_layer(self, layer):
        layer.forward = torch.compile(layer.forward, backend="aot_eager")


def _weights_after(name, weights, compiled, precision, options):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    kind = _Compiled if options["activation_checkpointing"] == "none" else _CompiledInside
    module = (kind if compiled else _Module)(CONFIGS[name], 4, weights)
    trainer = quiet_trainer(
        devices=2,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=2, **options),
        precision=precision,
        max_steps=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)
    offload = trainer.strategy._offload
    return {n: whole(p) for n, p in module.model.named_parameters()}, offload and offload.counters.bytes_out


def _compare_weights(name, weights, compiled, precision, checkpointing, offload):
    options = {"activation_checkpointing": checkpointing}
    expected, _ = _weights_after(name, weights, compiled, precision, options)
    got, moved = _weights_after(name, weights, compiled, precision, {**options, "activation_offload": offload})
    return [name for name, value in expected.items() if not torch.equal(got[name], value)], moved


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("compiled", "precision", "checkpointing", "level"),
    [
        (False, "bf16-true", "full", "boundary"),
        (False, "bf16-true", "selective", "policy"),
        (False, "bf16-mixed", "none", "all"),
        (True, "32-true", "none", "all"),
        (True, "32-true", "full", "boundary"),
    ],
)
def test_bfloat16_and_compiled_blocks(compiled, precision, checkpointing, level, mode):
    offload = {"mode": mode, "level": level, "keep_last_blocks": 0, **BASE}
    arguments = ("llama", start_weights("llama"), compiled, precision, checkpointing, offload)
    for different, moved in run_ranks(_compare_weights, 2, *arguments):
        assert different == []
        assert moved > 0
