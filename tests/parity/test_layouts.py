"""One and five steps in every layout equal one plain process: losses, every gradient, every weight, fp32.

The reference loops over documents with transformers' eager attention and plain cross entropy. A deviation of the first
gradient points at the step (exchange, masks, loss, scale); one of later weights alone at the optimizer or at the data.
1e-5 is ten times what fp32 summation order gives here; the mutants in ``test_mutants`` are above 1e-3.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.parity.layouts import train_layout
from tests.parity.models import CONFIGS
from tests.parity.reference import plain_model, reference, relative_error, step_loss

pytestmark = pytest.mark.distributed

WORLDS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
TOLERANCE = 1e-5


def start_weights(name):
    return {n: t.clone() for n, t in plain_model(name, seed=0).state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("world", "sp"), WORLDS)
def test_qwen3_moe_equals_a_plain_process(world, sp, accumulate):
    check_layout("qwen3_moe", world, sp, accumulate)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_a_router_loss_over_the_row_equals_a_plain_process(world, sp):
    check_layout("qwen3_moe_balanced", world, sp, 3)


def test_the_router_loss_reaches_every_gradient():
    plain, balanced = (reference(name, 2, 1)["gradients"] for name in ("qwen3_moe", "qwen3_moe_balanced"))
    routers = [name for name in plain if "gate.weight" in name]
    assert len(routers) == 2
    assert min(relative_error({n: balanced[n]}, {n: plain[n]}) for n in routers) > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 2), (4, 4)])
def test_dense_models_equal_a_plain_process(name, world, sp):
    check_layout(name, world, sp, 3)


def check_layout(name, world, sp, accumulate):
    expected = reference(name, (world // sp) * accumulate, 5)
    ranks = run_ranks(train_layout, world, name, start_weights(name), world, sp, accumulate, 5, timeout=60)
    got = ranks[0]
    assert got["steps"] == 5
    assert relative_error(got["gradients"], expected["gradients"]) <= TOLERANCE
    assert relative_error(got["first_weights"], expected["first_weights"]) <= TOLERANCE
    assert relative_error(got["weights"], expected["weights"]) <= TOLERANCE
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert all(rank["losses"] == got["losses"] for rank in ranks)


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (4, 2)])
def test_clipping_by_norm_equals_a_plain_process(world, sp):
    expected = reference("qwen3", (world // sp) * 2, 3, clip=0.1)
    got = run_ranks(train_layout, world, "qwen3", start_weights("qwen3"), world, sp, 2, 3, 0.1)[0]
    assert min(expected["norms"]) > 0.1, "the clip must bite"
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert relative_error(got["weights"], expected["weights"]) <= TOLERANCE


@pytest.mark.parametrize(("world", "sp"), [(1, 1), (2, 2), (4, 2)])
def test_validation_loss_equals_a_plain_process(world, sp):
    got = run_ranks(train_layout, world, "qwen3", start_weights("qwen3"), world, sp, 1, 2)[0]
    model = plain_model("qwen3", seed=0)
    model.load_state_dict(got["weights"])
    with torch.no_grad():
        total, targets = step_loss(model, list(range(2 * (world // sp))))  # two rows of each replica
    assert got["val_loss"] == pytest.approx(float(total) / targets, rel=1e-5)


def test_every_model_of_the_proofs_is_used():
    assert set(CONFIGS) == {"llama", "qwen3", "qwen3_moe", "qwen3_moe_balanced"}
