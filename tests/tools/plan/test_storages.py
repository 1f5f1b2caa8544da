"""The counter against sums by hand: what lives, what for, and when most of it does."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_longctx.tools.plan.storages import StorageCounter

KIB = 1024


@pytest.fixture(params=["real", "fake"])
def counter(request: pytest.FixtureRequest):
    """Counting real tensors and fake ones."""
    found = StorageCounter(vocab_size=16)
    if request.param == "real":
        with found:
            yield found
    else:
        with FakeTensorMode(), found:
            yield found


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * 256)


def test_the_peak_is_the_largest_sum_of_what_lives(counter):
    a = kib(4)
    b = kib(2)
    del a
    c = kib(1)
    assert counter.total == 3 * KIB
    assert counter.segments[0].peak == 6 * KIB
    counter.mark("later")
    d = kib(2)
    assert [(part.name, part.peak) for part in counter.segments] == [("start", 6 * KIB), ("later", 5 * KIB)]
    del b, c, d
    assert counter.total == 0


def test_views_and_in_place_operations_take_nothing(counter):
    a = kib(4)
    views = [a.view(32, 32), a[:10], a.t() if a.dim() == 2 else a.expand(2, -1), a.add_(1), a.detach()]
    assert counter.total == 4 * KIB
    del a
    assert counter.total == 4 * KIB, "a view holds the storage"
    del views
    assert counter.total == 0


def test_categories_at_the_peak(counter):
    with counter.filling("parameters"):
        weight = kib(1)
    hidden = kib(2)
    logits = torch.empty(8, 16)  # the last dimension is the vocabulary
    with counter.filling("optimizer"):
        state = torch.empty(8, 16)
    segment = counter.segments[0]
    assert {name: size for name, size in segment.parts.items() if size} == {
        "parameters": KIB,
        "activations": 2 * KIB,
        "logits": 512,
        "optimizer": 512,
    }
    assert sum(segment.parts.values()) == segment.peak
    counter.count(hidden, "gradients")
    assert (counter.live["activations"], counter.live["gradients"], counter.total) == (0, 2 * KIB, 4 * KIB)
    del weight, logits, state


def test_regions_of_the_profiler_are_categories(counter):
    with torch.profiler.record_function("longctx::exchange"):
        sent = kib(1)
        with torch.profiler.record_function("anything else"):
            inner = kib(2)
    after = kib(4)
    assert (counter.live["exchange"], counter.live["activations"]) == (3 * KIB, 4 * KIB)
    del sent, inner, after


def test_a_resized_storage_counts_as_it_is(counter):
    a = kib(4)
    a.untyped_storage().resize_(0)
    assert counter.total == 0
    a.untyped_storage().resize_(4 * KIB)
    assert (counter.total, counter.segments[0].peak) == (4 * KIB, 4 * KIB)


def test_what_is_on_meta_is_host_memory(counter):
    a = torch.empty(256, device="meta")
    assert (counter.host, counter.total, counter.segments[0].host) == (KIB, 0, KIB)
    del a
    assert (counter.host, counter.segments[0].host) == (0, KIB)


def test_saved_tensors_and_gradients_of_autograd(counter):
    x = torch.empty(256, requires_grad=True)
    y = x.exp()  # keeps its result for backward
    z = y.sin()  # keeps y
    total = z.sum()
    del y, z
    assert counter.total == 2 * KIB + 4, "x, y and the sum"
    total.backward()
    del total
    assert counter.total == 2 * KIB, "x and its gradient"


def test_the_largest_tensor(counter):
    kept = torch.empty(3, 7), torch.empty(5, 5), torch.empty(24)
    assert counter.largest == (25, (5, 5))
    del kept
