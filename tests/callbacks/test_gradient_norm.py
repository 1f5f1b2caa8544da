"""The squared gradient norm as shares of ranks: whole, sharded unevenly, replicated, and pending gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_longctx.callbacks.gradient_norm import gradient_squares
from tests.helpers.pool import run_ranks


def share(parameters: list[Tensor], ranks: int = 1) -> Tensor:
    into = torch.full((), 7.0, dtype=torch.float64)  # whatever was there before
    gradient_squares(parameters, ranks, into)
    return into


def with_gradient(gradient: Tensor) -> Tensor:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_equals_the_norm_of_clipping() -> None:
    parameters = [with_gradient(torch.randn(shape)) for shape in [(3, 4), (5,), (), (0, 3)]]
    norm = nn.utils.clip_grad_norm_(parameters, math.inf)
    assert math.isclose(math.sqrt(share(parameters)), norm.item(), rel_tol=1e-6)


def test_parameters_without_gradient_are_passed_over() -> None:
    assert share([nn.Parameter(torch.ones(3)), with_gradient(torch.tensor([3.0, 4.0]))]) == 25.0
    assert share([nn.Parameter(torch.ones(3))]) == 0.0


def test_low_precision_gradients_are_summed_in_float32() -> None:
    # The norm of 1,000 ones is 31.62; in bfloat16 it would be 31.625 and its square 1000.14.
    gradient = torch.ones(1000, dtype=torch.bfloat16)
    assert math.isclose(share([with_gradient(gradient)]).item(), 1000.0, rel_tol=1e-6)


def test_double_and_sparse_gradients() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert embedding.weight.grad.is_sparse
    wide = with_gradient(torch.tensor([1e60], dtype=torch.float64))  # beyond float32
    assert math.isclose(share([embedding.weight]).item(), 2 * 2**2 + 2 * 1, rel_tol=1e-6)
    assert math.isclose(share([embedding.weight, wide]).item(), 1e120, rel_tol=1e-12)


def test_gradients_that_are_not_finite_show() -> None:
    assert math.isnan(share([with_gradient(torch.tensor([1.0, math.nan]))]))
    assert math.isinf(share([with_gradient(torch.tensor([1.0, math.inf]))]))


def _distributed_shares() -> tuple[float, float]:
    dist.init_process_group("gloo")
    flat = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = hybrid["shard"]  # covers two of the four ranks
    layouts: list[tuple[tuple[int, ...], object, list[Placement]]] = [
        ((7, 3), flat, [Shard(0)]),  # 2 + 2 + 2 + 1 rows
        ((2, 3), flat, [Shard(0)]),  # two ranks hold nothing
        ((4, 3), flat, [Replicate()]),
        ((5, 3), hybrid, [Replicate(), Shard(0)]),
        ((5, 4), hybrid, [Shard(0), Shard(1)]),
        ((3, 4), half, [Shard(1)]),
    ]
    generator = torch.Generator().manual_seed(3)
    parameters, squares = [], 0.0
    for shape, mesh, placements in layouts:
        whole = torch.randn(shape, generator=generator)
        squares += whole.double().square().sum().item()
        parameters.append(with_gradient(distribute_tensor(whole, mesh, placements)))
    whole = torch.randn(6, generator=generator)
    squares += whole.double().square().sum().item()
    parameters.append(with_gradient(whole))  # outside of any sharding: the same on each rank
    pending = DTensor.from_local(whole / 4, flat, [Partial()])
    squares += whole.double().square().sum().item()
    parameters.append(with_gradient(pending))
    total = share(parameters, ranks=4)
    dist.all_reduce(total)
    return total.item(), squares


@pytest.mark.distributed
def test_shares_of_four_ranks_add_up() -> None:
    for total, squares in run_ranks(_distributed_shares, 4):
        assert math.isclose(total, squares, rel_tol=1e-6)
