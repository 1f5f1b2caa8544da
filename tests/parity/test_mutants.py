"""Each proof must be able to fail: one broken part at a time gives a gradient that is plainly wrong."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from lightning_longctx.batch import PackedSequence
from lightning_longctx.strategies import fsdp2, ulysses
from lightning_longctx.strategies.mesh import build_layout
from lightning_longctx.token_mean import TokenMean
from tests.helpers.pool import run_ranks
from tests.parity.layouts import train_layout
from tests.parity.reference import reference, relative_error
from tests.parity.test_layouts import TOLERANCE, start_weights

pytestmark = pytest.mark.distributed

PLAINLY_WRONG = 1e-3


@contextmanager
def mesh_without_sequence_parallel():
    """Parameters sharded over data-parallel ranks only: ranks that share a row never reduce their gradients."""

    def build(device_type, sp_size, replicas):
        layout = build_layout(device_type, sp_size, replicas)
        topology = replace(layout.topology, ranks_averaged=layout.topology.dp_size)
        return replace(layout, shard_mesh=layout.data_parallel, topology=topology)

    with mock.patch.object(fsdp2, "build_layout", build):
        yield


@contextmanager
def divisor_for_each_rank():
    """Each rank divides by its own targets: a mean of means."""
    original = TokenMean.scale_gradients

    def scale(self, parameters, accumulate):
        self._topology = replace(self._topology, token_group=None, ranks_averaged=1)
        original(self, parameters, accumulate)

    with mock.patch.object(TokenMean, "scale_gradients", scale):
        yield


@contextmanager
def glued_documents():
    """Attention crosses document borders."""
    original = PackedSequence.bounds

    def bounds(self):
        return (0, original(self)[-1])

    with mock.patch.object(PackedSequence, "bounds", bounds):
        yield


@contextmanager
def wrong_order_of_key_value_heads():
    """Key/value heads repeated 0 1 0 1 and not 0 0 1 1."""
    original = ulysses._exchange_heads

    def exchange(query, key, value, group, size):
        copies = max(1, size // key.shape[1])
        return original(query, key.repeat(1, copies, 1, 1), value.repeat(1, copies, 1, 1), group, size)

    with mock.patch.object(ulysses, "_exchange_heads", exchange):
        yield


@pytest.mark.parametrize(
    ("mutate", "world", "sp"),
    [
        (mesh_without_sequence_parallel, 4, 2),
        (divisor_for_each_rank, 4, 2),
        (glued_documents, 2, 2),
        (wrong_order_of_key_value_heads, 4, 4),
    ],
)
def test_a_broken_part_shows_in_the_gradients(mutate, world, sp):
    expected = reference("qwen3", (world // sp) * 2, 1)["gradients"]
    broken = run_ranks(train_layout, world, "qwen3", start_weights("qwen3"), world, sp, 2, 1, None, mutate)[0]
    assert relative_error(broken["gradients"], expected) > PLAINLY_WRONG
    whole = run_ranks(train_layout, world, "qwen3", start_weights("qwen3"), world, sp, 2, 1)[0]
    assert relative_error(whole["gradients"], expected) <= TOLERANCE
