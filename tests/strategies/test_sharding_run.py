"""That settings do what they say: what is cut, how often gradients travel, what is trained, in which precision."""

from __future__ import annotations

import warnings
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from lightning_longctx import LongContextFSDPStrategy, causal_lm_loss, is_recomputing, topology_of
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.parity.layouts import whole
from tests.strategies.own_model import OwnModule

pytestmark = pytest.mark.distributed


class Adapted(OwnModule):
    """Frozen but for low-rank adapters around the heads' projections, and one expert that only some ranks use."""

    def __init__(self, **options):
        super().__init__(**options)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.expert = nn.Linear(16, 16, bias=False)

    def loss_of(self, batch):
        x = self.embedding(batch["input_ids"])
        x = x + self.up(self.down(x))
        everyone = not hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # before torch 2.13
        x = x + self.expert(x) if everyone or topology_of(self.trainer).rank == 0 else x
        for block in self.blocks:
            x = block(x, batch)
        return causal_lm_loss(x, self.head.weight, batch)


class Watch(Callback):
    """Gradients of the first step, and the exchanges of its first micro-batch."""

    def __init__(self):
        self.gradients, self.exchanges = {}, 0

    def on_after_backward(self, trainer, pl_module):
        self.exchanges = self.exchanges or trainer.strategy._exchange.count

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.gradients:
            self.gradients = {n: whole(p.grad) for n, p in pl_module.named_parameters() if p.grad is not None}


def train(world, strategy, module=None, **options):
    """Fit an own module; returns facts, gradients of the first step and final weights."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec")
    module = module or OwnModule(rows=options.pop("rows", 8))
    watch, counts = Watch(), []
    reduce = _fsdp_param_group.foreach_reduce
    settings = {"max_steps": 2, "limit_val_batches": 0, **options}
    trainer = quiet_trainer(
        devices=world,
        strategy=LongContextFSDPStrategy(**strategy),
        callbacks=[watch],
        **settings,
    )
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", lambda *a: (counts.append(1), reduce(*a))[1]):
        trainer.fit(module)
    parameters = dict(module.named_parameters())
    return {
        "placements": {n: str(getattr(p, "placements", "whole")) for n, p in parameters.items()},
        "local": {
            n: (p.to_local() if isinstance(p, DTensor) else p).numel() / p.numel() for n, p in parameters.items()
        },
        "dtypes": {str(p.dtype) for p in parameters.values()},
        "gradient_dtypes": {str(p.dtype) for p in watch.gradients.values()},
        "gradients": watch.gradients,
        "weights": {n: whole(p) for n, p in parameters.items()},
        "reductions": len(counts),
        "exchanges": watch.exchanges,
        "steps": trainer.global_step,
    }


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_replicas_are_copies_of_shards():
    facts = run_ranks(train, 4, 4, {"sequence_parallel_size": 2, "data_parallel_replicate_size": 2})[0]
    assert set(facts["placements"].values()) == {"(Replicate(), Shard(dim=0))"}
    assert set(facts["local"].values()) == {0.5}
    facts = run_ranks(train, 4, 4, {"sequence_parallel_size": 2})[0]
    assert set(facts["placements"].values()) == {"(Shard(dim=0),)"}
    assert set(facts["local"].values()) == {0.25}


def test_parameters_outside_sharding_are_whole_everywhere():
    sharding = {"unsharded_parameters": ["blocks.*.bias"]}
    facts = run_ranks(train, 2, 2, {"sequence_parallel_size": 2, "sharding": sharding})
    kept = {name for name, where in facts[0]["placements"].items() if where == "whole"}
    assert kept == {f"blocks.{block}.{layer}.bias" for block in range(2) for layer in ("qkv", "out")}
    assert_equal(facts[0]["weights"], facts[1]["weights"])
    assert_equal(facts[0]["weights"], run_ranks(train, 2, 2, {"sequence_parallel_size": 2})[0]["weights"])


def clip_values(sharding):
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    return train(2, {"sequence_parallel_size": 2, "sharding": sharding}, **options)


def test_values_are_clipped_of_sharded_and_whole_parameters_alike():
    mixed = run_ranks(clip_values, 2, {"unsharded_parameters": ["blocks.*.bias"]})[0]
    assert_equal(mixed["weights"], run_ranks(clip_values, 2, {})[0]["weights"])
    start, free = OwnModule().state_dict(), run_ranks(train, 2, 2, {"sequence_parallel_size": 2})[0]["weights"]
    for name in ("head.weight", "blocks.0.qkv.bias"):  # two steps at a rate of 0.1
        assert (mixed["weights"][name] - start[name]).abs().max() <= 2 * 1e-3 * 0.1 + 1e-7
        assert (free[name] - start[name]).abs().max() > 2 * 1e-3 * 0.1, "the clip must bite"


def accumulate(reduce_gradients, rows, **more):
    options = {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": 3, "rows": rows, **more}
    return train(2, {"sequence_parallel_size": 2, "sharding": {"reduce_gradients": reduce_gradients}}, **options)


def test_late_reduction_travels_once_a_step_also_in_a_short_last_window():
    each = run_ranks(accumulate, 2, "every_micro_batch", 7)[0]  # 3 + 3 + 1 micro-batches
    last = run_ranks(accumulate, 2, "last_micro_batch", 7)[0]
    assert each["steps"] == last["steps"] == 3
    units = 3  # two blocks and the root
    assert each["reductions"] == 7 * units
    assert last["reductions"] == 3 * units
    assert_equal(last["weights"], each["weights"])


def accumulate_and_validate(reduce_gradients):
    return accumulate(reduce_gradients, 6, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1)


def test_validation_between_micro_batches_loses_no_gradient():
    each, last = (run_ranks(accumulate_and_validate, 2, when)[0] for when in ("every_micro_batch", "last_micro_batch"))
    assert_equal(last["weights"], each["weights"])
    assert_equal(each["weights"], run_ranks(accumulate, 2, "every_micro_batch", 6)[0]["weights"])


@pytest.mark.parametrize(("mode", "exchanges"), [("none", 2), ("full", 4), ({"mode": "every_n", "n": 2}, 3)], ids=str)
def test_recompute_exchanges_again(mode, exchanges):
    strategy = {"sequence_parallel_size": 2, "activation_checkpointing": mode}
    facts = run_ranks(train, 2, 2, strategy)
    assert [rank["exchanges"] for rank in facts] == [exchanges] * 2


def train_adapted(world, sp, mode):
    return train(world, {"sequence_parallel_size": sp, "activation_checkpointing": mode}, Adapted())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_adapters_train_and_the_frozen_rest_stays(mode):
    start = Adapted().state_dict()
    for world, sp in [(1, 1), (2, 2), (4, 2)]:
        for rank in run_ranks(train_adapted, world, world, sp, mode):
            assert set(rank["gradients"]) == {"down.weight", "up.weight", "expert.weight"}
            for name, value in rank["weights"].items():
                assert torch.equal(value, start[name]) == (name not in rank["gradients"]), name


def train_compiled(compiled):
    warnings.simplefilter("ignore")  # the compiler reads `.grad` of tensors that are no leaves
    module = OwnModule()
    if compiled:
        for block in module.blocks:
            block.compile(backend="aot_eager")
    return train(2, {"sequence_parallel_size": 2}, module)


def test_compiled_blocks_give_the_same_gradients():
    plain, compiled = (run_ranks(train_compiled, 2, flag, timeout=120)[0] for flag in (False, True))
    assert_equal(compiled["gradients"], plain["gradients"])


def train_compiled_and_recomputed(mode):
    """Fit with compiled forwards; returns gradients, and how often compiled graphs ran in forward and backward."""
    warnings.simplefilter("ignore")
    module, runs = OwnModule(), []

    def backend(graph, inputs):
        compiled = aot_eager(graph, inputs)
        return lambda *args: (runs.append(is_recomputing()), compiled(*args))[1]

    for block in module.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    facts = train(2, {"sequence_parallel_size": 2, "activation_checkpointing": mode}, module)
    return {**facts, "forward": runs.count(False), "again": runs.count(True)}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_forwards_are_computed_again_compiled(mode):
    plain = run_ranks(train_compiled, 2, False)[0]
    compiled = run_ranks(train_compiled_and_recomputed, 2, mode, timeout=120)[0]
    assert_equal(compiled["gradients"], plain["gradients"])
    assert compiled["forward"] == compiled["again"] > 0


@pytest.mark.parametrize(
    ("precision", "stored"),
    [("32-true", "torch.float32"), ("bf16-mixed", "torch.float32"), ("bf16-true", "torch.bfloat16")],
)
def test_precision(precision, stored):
    exact = run_ranks(train, 2, 2, {"sequence_parallel_size": 2})[0]["gradients"]
    facts = run_ranks(train_in, 2, precision)[0]
    assert facts["dtypes"] == facts["gradient_dtypes"] == {stored}
    error = max(float((facts["gradients"][n].float() - g).abs().max() / g.abs().max()) for n, g in exact.items())
    assert (error == 0) if precision == "32-true" else 1e-5 < error < 5e-2


def train_in(precision):
    return train(2, {"sequence_parallel_size": 2}, precision=precision)


def profiled():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        offload = {"mode": "sync", "level": "all", "min_tensor_mib": 1e-6}
        train(2, {"sequence_parallel_size": 2, "activation_offload": offload}, max_steps=1)
    return {event.key: event.count for event in profile.key_averages()}


def test_a_profile_names_exchange_attention_and_gathering():
    counts = run_ranks(profiled, 2)[0]
    assert counts["longctx::exchange"] == 8  # there and back in each of two blocks, and again in backward
    assert counts["longctx::attention"] == 2
    assert counts["longctx::offload"] % 2 == 0  # out and in again
    assert counts["longctx::offload"] > 0
    for name in ("FSDP::all_gather", "FSDP::pre_forward", "FSDP::post_backward_reduce"):
        assert any(key.startswith(name) and "blocks.1" in key for key in counts), name


def save_then_resume(folder, first, second):
    """Two steps, a stock checkpoint, then two more in another layout."""
    warnings.simplefilter("ignore")
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    for steps, strategy, path in ((2, first, None), (4, second, f"{folder}/two")):
        module = OwnModule(rows=8)
        trainer = pl.Trainer(
            accelerator="cpu", devices=4, strategy=LongContextFSDPStrategy(**strategy), max_steps=steps, **options
        )
        trainer.fit(module, ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(f"{folder}/two")
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def test_a_checkpoint_moves_between_layouts(tmp_path):
    plain = {"sequence_parallel_size": 2}
    rich = {
        **plain,
        "data_parallel_replicate_size": 2,
        "activation_checkpointing": "full",
        "sharding": {"unsharded_parameters": ["blocks.*.bias"]},
    }
    weights = [
        run_ranks(save_then_resume, 4, str(tmp_path / name), *layouts)[0]
        for name, layouts in {"stay": (plain, plain), "to": (plain, rich), "from": (rich, plain)}.items()
    ]
    assert_equal(weights[1], weights[0])
    assert_equal(weights[2], weights[0])
