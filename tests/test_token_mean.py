"""``TokenMean`` by itself: the factor, the first-step check, and agreement between ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.token_mean import TokenMean
from lightning_longctx.topology import Topology
from tests.helpers.pool import RankError, run_ranks

DIVISOR = 16


def make_batch(targets: int, divisor: int = DIVISOR) -> dict[str, Any]:
    labels = torch.full((1, 12), -100)
    labels[0, :targets] = 1
    return {"shift_labels": labels, "loss_divisor": divisor}


def make_output(batch: dict[str, Any], value: float = 2.0) -> dict[str, Any]:
    losses = value * (batch["shift_labels"] != -100).float()
    return {"loss": losses.sum() / batch["loss_divisor"], "per_token_loss": losses}


def make_mean(required: bool = True, topology: Topology | None = None) -> TokenMean:
    return TokenMean(topology or Topology(), "the test", required)


def run(mean: TokenMean, *targets: int) -> None:
    for count in targets:
        batch = make_batch(count)
        mean.training_step(lambda batch=batch: make_output(batch), batch)


def gradient_of(mean: TokenMean, accumulate: int, dtype: torch.dtype = torch.float32) -> float:
    """What becomes of a gradient of 1."""
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.ones(3, dtype=dtype)
    mean.scale_gradients([parameter, nn.Parameter(torch.zeros(2))], accumulate)
    assert len(set(parameter.grad.tolist())) == 1
    assert parameter.grad.dtype == dtype
    return parameter.grad[0].item()


@pytest.mark.parametrize(
    ("targets", "accumulate", "ranks", "factor"),
    [
        pytest.param([4], 1, 1, DIVISOR / 4, id="one"),
        pytest.param([4, 0, 12], 3, 1, 3 * DIVISOR / 16, id="window"),
        pytest.param([5], 3, 1, 3 * DIVISOR / 5, id="short_last_window"),
        pytest.param([0, 0], 2, 1, 2 * DIVISOR, id="no_targets"),
        pytest.param([4], 1, 8, 8 * DIVISOR / 4, id="averaged_over_ranks"),
    ],
)
def test_factor(targets: list[int], accumulate: int, ranks: int, factor: float) -> None:
    mean = make_mean(topology=Topology(ranks_averaged=ranks))
    run(mean, *targets)
    assert gradient_of(mean, accumulate) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    mean = make_mean()
    run(mean, 4)
    assert gradient_of(mean, 1, dtype) == 4.0


class _RoundingLikeAGpu(TorchDispatchMode):
    """There a 0-d factor takes the dtype of what it multiplies before it does; a CPU reads it in full."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0][0] if args and isinstance(args[0], list) else args[0] if args else None
        if len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 0 and first.dim():
            args = (args[0], args[1].to(first.dtype), *args[2:])
        return func(*args, **(kwargs or {}))


def test_the_factor_of_bfloat16_gradients_is_not_rounded_on_a_gpu() -> None:
    mean = make_mean()
    run(mean, 12)
    parameter = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    gradient = torch.arange(1.0, 257.0, dtype=torch.bfloat16)
    parameter.grad = gradient.clone()
    with _RoundingLikeAGpu():
        mean.scale_gradients([parameter], 1)
    assert torch.equal(parameter.grad, (gradient.float() * (DIVISOR / 12)).bfloat16())


def test_each_step_counts_anew() -> None:
    mean = make_mean()
    run(mean, 4)
    assert gradient_of(mean, 1) == 4.0
    run(mean, 8)
    assert gradient_of(mean, 1) == 2.0


def test_nothing_counted_scales_nothing() -> None:
    assert gradient_of(make_mean(), 1) == 1.0


def test_the_output_is_passed_through() -> None:
    batch = make_batch(3)
    output = make_output(batch)
    assert make_mean().training_step(lambda: output, batch) is output


def test_scaling_inside_of_the_step_sees_its_batch() -> None:
    # Manual optimization: the optimizer steps before `training_step` returns.
    mean, batch, seen = make_mean(), make_batch(4), []

    def step() -> dict[str, Any]:
        seen.append(gradient_of(mean, 1))
        return make_output(batch)

    for _ in range(2):
        mean.training_step(step, batch)
    assert seen == [4.0, 4.0]


def test_a_skipped_micro_batch_does_not_count() -> None:
    mean = make_mean()
    run(mean, 4)
    mean.training_step(lambda: None, make_batch(8))
    assert gradient_of(mean, 1) == 4.0


def test_a_divisor_that_changes_inside_a_step_is_an_error() -> None:
    mean = make_mean()
    run(mean, 4)
    with pytest.raises(BatchContractError, match="loss_divisor.*32 after 16"):
        mean.training_step(lambda: None, make_batch(4, divisor=32))


def test_a_divisor_may_change_between_steps() -> None:
    mean = make_mean()
    run(mean, 4)
    gradient_of(mean, 1)
    batch = make_batch(4, divisor=32)
    mean.training_step(lambda: make_output(batch), batch)
    assert gradient_of(mean, 1) == 8.0


@pytest.mark.parametrize("change", [lambda loss: loss * 1.01, lambda loss: loss + 0.1], ids=["scaled", "shifted"])
def test_a_loss_that_is_not_the_sum_is_an_error(change: Callable[[Tensor], Tensor]) -> None:
    batch = make_batch(4)
    output = make_output(batch)
    with pytest.raises(ConfigurationError, match=r"per_token_loss.sum\(\) / loss_divisor.*0.5 is expected"):
        make_mean().training_step(lambda: output | {"loss": change(output["loss"])}, batch)


def test_declared_extra_terms_are_part_of_the_loss() -> None:
    batch = make_batch(4)
    output = make_output(batch)
    terms = {"router": torch.tensor(0.25), "z": torch.tensor(0.5)}
    output = output | {"loss": output["loss"] + 0.75, "extra_terms": terms}
    mean = make_mean()
    mean.training_step(lambda: output, batch)
    assert gradient_of(mean, 1) == 4.0
    with pytest.raises(ConfigurationError, match="extra_terms"):
        make_mean().training_step(lambda: output | {"extra_terms": {"z": torch.tensor(0.5)}}, batch)


def test_only_the_first_step_is_checked() -> None:
    mean = make_mean()
    run(mean, 4)
    batch = make_batch(4)
    mean.training_step(lambda: make_output(batch) | {"loss": torch.tensor(9.0)}, batch)  # no host read to find it


def test_token_losses_that_end_are_an_error() -> None:
    mean = make_mean()
    run(mean, 4)
    with pytest.raises(ConfigurationError, match="per_token_loss"):
        mean.training_step(lambda: {"loss": torch.ones(())}, make_batch(4))


@pytest.mark.parametrize("output", [torch.ones(()), {"loss": torch.ones(())}], ids=["tensor", "dict"])
@pytest.mark.parametrize("batch", [make_batch(4), {"input_ids": torch.ones(1, 4)}], ids=["packed", "other"])
def test_without_token_losses_required_is_an_error_and_else_one_warning(output: Any, batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="per_token_loss.*the test"):
        make_mean(required=True).training_step(lambda: output, batch)
    mean = make_mean(required=False)
    with pytest.warns(UserWarning, match="the test: .* mean of means"):
        mean.training_step(lambda: output, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean.training_step(lambda: output, batch)
    assert gradient_of(mean, 1) == 1.0  # the mean of means keeps its gradients


def _topology() -> Topology:
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    return Topology(rank, size, rank, size, token_group=world, host_group=world, ranks_averaged=size)


def _factors() -> tuple[float, float, list[float]]:
    topology = _topology()
    mean = make_mean(topology=topology)
    run(mean, 3 * topology.rank, 1)  # rank 0 has one target, rank 1 four
    uneven = gradient_of(mean, 2)
    run(mean, 0)
    none = gradient_of(mean, 1)
    run(mean, 4)
    sharded = distribute_tensor(torch.zeros(3), init_device_mesh("cpu", (2,)), [Shard(0)])
    parameter = nn.Parameter(sharded)
    parameter.grad = sharded.detach() + 1
    mean.scale_gradients([parameter], 1)
    return uneven, none, parameter.grad.full_tensor().tolist()


@pytest.mark.distributed
def test_targets_of_all_ranks_count_and_shards_are_scaled() -> None:
    for uneven, none, sharded in run_ranks(_factors, 2):
        assert uneven == pytest.approx(2 * 2 * DIVISOR / 5, rel=1e-6)
        assert none == 2 * DIVISOR
        assert sharded == [2 * DIVISOR / 8] * 3


def _fault_on_rank_1() -> None:
    mean = make_mean(topology=_topology())
    batch = make_batch(4)
    output = make_output(batch)
    mean.training_step(lambda: output if dist.get_rank() == 0 else output["loss"], batch)


@pytest.mark.distributed
def test_a_fault_on_one_rank_is_raised_on_all() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_fault_on_rank_1, 2)
    messages = {rank: str(cause) for rank, cause in caught.value.causes.items()}
    assert "an error on another rank" in messages[0]
    assert "per_token_loss" in messages[1]
