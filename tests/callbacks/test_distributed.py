"""Both callbacks on several processes equal one plain process: DDP, a sliced row, FSDP 2, tensor parallelism."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_longctx.batch import TOKEN_KEYS
from lightning_longctx.callbacks import ExactTokenMean, MaxTokens, RunGuard, TrainingMetrics
from lightning_longctx.callbacks.step_sums import Field
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.loss import causal_lm_loss
from lightning_longctx.topology import Topology
from tests.callbacks.toy import DIVISOR, TOKENS, ToyLM, loader, make_batch, plain_loop, run_fit, token_mean
from tests.helpers.pool import RankError, run_ranks

pytestmark = pytest.mark.distributed

# A micro-batch without targets, and a last window of one.
TARGETS = [3, 9, 0, 5, 8, 1, 7, 2, 4, 6]
BATCHES = [make_batch(seed, targets) for seed, targets in enumerate(TARGETS)]
KEYS = (
    "train/loss",
    "train/grad_norm",
    "train/target_tokens",
    "train/source_tokens",
    "data/source_fill",
    "val/loss",
)


class _SlicedRow(DDPStrategy):
    """All ranks share each row: a stand-in for sequence parallelism of a model whose tokens do not see one another."""

    @property
    def topology(self) -> Topology:
        size, rank = dist.get_world_size(), dist.get_rank()
        group = dist.group.WORLD
        return Topology(
            rank=rank,
            world_size=size,
            sp_rank=rank,
            sp_size=size,
            sp_group=group,
            token_group=group,
            host_group=group,
            ranks_averaged=size,
        )

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        topology = self.topology
        return batch | {key: batch[key].chunk(topology.sp_size, 1)[topology.sp_rank] for key in TOKEN_KEYS}


class _Sharded(ToyLM):
    """FSDP 2 of the head; the embedding stays whole and outside, as frozen or tiny parameters may."""

    def configure_model(self) -> None:
        self.whole = self.model.embedding.weight
        fully_shard(self, mesh=self.device_mesh["data_parallel"], ignored_params={self.whole})
        for method in ("training_step", "validation_step"):
            register_fsdp_forward_method(self, method)

    def on_after_backward(self) -> None:
        # Nobody else averages what is outside of FSDP.
        dist.all_reduce(self.whole.grad)
        self.whole.grad /= self.trainer.world_size


class _TensorParallel(ToyLM):
    """The head cut over its rows, then over data-parallel ranks; the embedding whole on each tensor-parallel rank."""

    def configure_model(self) -> None:
        layout = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], {"head": layout})
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])
            for method in ("training_step", "validation_step"):
                register_fsdp_forward_method(self, method)

    def _step(self, batch: Any) -> dict[str, Tensor]:
        logits = self.model.head(self.model(batch["input_ids"]))
        out = causal_lm_loss(None, None, batch, logits=logits)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}


def _record(strategy: Any, module: ToyLM, accumulate: int, readers: int, reader: int) -> dict[str, Any]:
    """Train two steps on this rank's share of the batches; return what was logged and what came of it."""
    span = 2 * accumulate * readers
    # Three validation batches: with two readers the second has one fewer than the first.
    validation = loader(BATCHES[:3][reader::readers])
    metrics = TrainingMetrics()
    trainer = run_fit(
        [ExactTokenMean(), metrics],
        module,
        BATCHES[:span][reader::readers],
        validation,
        strategy=strategy,
        devices=int(os.environ["WORLD_SIZE"]),
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
    )
    return {
        "logged": {key: trainer.logger.column(key) for key in KEYS},
        "callback": {key: trainer.callback_metrics[key].item() for key in (*KEYS, "train/tokens_per_s")},
        "weights": [_whole(parameter.detach()) for parameter in module.model.parameters()],
        "state": metrics.state_dict(),
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _rank() -> int:
    return int(os.environ["RANK"])


def _ddp(accumulate: int) -> dict[str, Any]:
    return _record("ddp", ToyLM(), accumulate, readers=2, reader=_rank())


def _sliced(accumulate: int) -> dict[str, Any]:
    return _record(_SlicedRow(), ToyLM(), accumulate, readers=1, reader=0)


def _fsdp2() -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return _record(strategy, _Sharded(), 2, readers=2, reader=_rank())


def _tensor_parallel(data_parallel: int) -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=data_parallel, tensor_parallel_size=2)
    return _record(strategy, _TensorParallel(), 2, readers=data_parallel, reader=_rank() // 2)


def check(ranks: list[dict[str, Any]], accumulate: int, readers: int) -> None:
    """Compare with a plain loop over the same steps in one process."""
    span = accumulate * readers
    expected = plain_loop([BATCHES[:span], BATCHES[span : 2 * span]])
    targets = [sum(TARGETS[:span]), sum(TARGETS[: 2 * span])]
    first = ranks[0]["logged"]
    assert first["train/loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert first["train/grad_norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert first["train/target_tokens"] == targets
    assert first["data/source_fill"] == pytest.approx([(TOKENS - 3) / DIVISOR] * 2)
    trained = ToyLM().model
    vector_to_parameters(parameters_to_vector(expected["weights"]), trained.parameters())
    assert first["val/loss"] == pytest.approx([token_mean(BATCHES[:3], trained)], rel=1e-5)
    for got in ranks:
        assert got["callback"] == ranks[0]["callback"]  # a monitor decides alike on every rank
        assert got["state"] == {"source_tokens": 2 * span * (TOKENS - 3), "target_tokens": targets[1]}
        for weight, truth in zip(got["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(weight, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2], ids=str)
def test_ddp_equals_one_plain_process(accumulate: int) -> None:
    check(run_ranks(_ddp, 2, accumulate), accumulate, readers=2)


@pytest.mark.parametrize("accumulate", [1, 3], ids=str)
def test_a_sliced_row_equals_one_plain_process(accumulate: int) -> None:
    check(run_ranks(_sliced, 2, accumulate), accumulate, readers=1)


def test_stock_fsdp2_equals_one_plain_process() -> None:
    check(run_ranks(_fsdp2, 2), 2, readers=2)


@pytest.mark.parametrize("data_parallel", [1, 2], ids=str)
def test_tensor_parallelism_equals_one_plain_process(data_parallel: int) -> None:
    check(run_ranks(_tensor_parallel, 2 * data_parallel, data_parallel), 2, readers=data_parallel)


def _limited(strategy: str, accumulate: int, limit: int) -> dict[str, Any]:
    """Train until a limit of targets; count the reductions of the tally, and where which rank stopped."""
    sliced, reductions, whole = strategy == "sliced", [], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reductions.append(tuple(tensor.shape))
        return whole(tensor, *args, **kwargs)

    dist.all_reduce = counted
    callbacks = [RunGuard(), MaxTokens(target=limit), TrainingMetrics()]
    try:
        trainer = run_fit(
            callbacks if _rank() else callbacks[::-1],  # the order does not matter, not even on one rank alone
            _Exact(),
            BATCHES if sliced else BATCHES[_rank() :: 2],
            strategy=_SlicedRow() if sliced else "ddp",
            devices=2,
            accumulate_grad_batches=accumulate,
            use_distributed_sampler=False,
            log_every_n_steps=100,
        )
    finally:
        dist.all_reduce = whole
    return {
        "steps": trainer.global_step,
        "seen": tuple(callbacks[1].seen),
        "logged": trainer.logger.column("train/target_tokens"),
        "reductions": reductions.count((len(Field),)),
    }


class _Exact(ToyLM):
    """Without ``ExactTokenMean``, whose reductions are its own."""


@pytest.mark.parametrize("limit", [1, 13, 27, 45], ids=str)
def test_a_limit_of_tokens_stops_all_layouts_at_the_same_step_with_one_reduction_each(limit: int) -> None:
    # Steps of two rows: a row on each of two ranks, or both rows cut over both ranks one after the other.
    ends = [sum(TARGETS[: 2 * step]) for step in range(1, 6)]
    steps = next(step for step, end in enumerate(ends, 1) if end >= limit)
    count = ends[steps - 1]
    expected = {
        "steps": steps,
        "seen": (2 * steps * (TOKENS - 3), count),
        "logged": [count],
        "reductions": steps,
    }
    for layout in (run_ranks(_limited, 2, "ddp", 1, limit), run_ranks(_limited, 2, "sliced", 2, limit)):
        assert layout == [expected, expected]


def _one_rank_without_token_losses() -> None:
    _record("ddp", ToyLM(per_token=_rank() == 0), 1, readers=2, reader=_rank())


def test_a_fault_on_one_rank_stops_all_of_them() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_one_rank_without_token_losses, 2)
    assert {type(cause) for cause in caught.value.causes.values()} == {ConfigurationError}
    assert caught.value.causes.keys() == {0, 1}
