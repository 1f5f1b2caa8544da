"""Order between streams, proven on CPU: copies run as late as is allowed, and what is freed turns into NaN."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_longctx.strategies.activation_offload.backend import CudaBackend
from lightning_longctx.strategies.activation_offload.stash import Stash
from lightning_longctx.strategies.activation_offload.virtual import Edge, VirtualBackend
from tests.strategies.activation_offload.helpers import (
    INPUT_BYTES,
    TOKENS,
    WIDTH,
    Model,
    batch,
    expected,
    gradients,
    running,
    same,
)

BUDGET = INPUT_BYTES * 1.5 / 2**20


def train(offload, blocks=6, steps=2, how="non-reentrant"):
    model = Model(blocks, how)
    offload.attach(model, model.layers)
    for step in range(steps):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
    return model, gradients(model)


@pytest.mark.parametrize("how", ["none", "non-reentrant"])
@pytest.mark.parametrize("prefetch_mib", [0, BUDGET, 1024.0])
@pytest.mark.parametrize("late", [True, False])
def test_gradients_are_right_however_late_copies_run(how, prefetch_mib, late):
    """torchtune#1867: NaN, since memory was freed while it was in use."""
    wanted = expected(Model(6), batch(1))
    offload = running("async", late=late, level="all", prefetch_mib=prefetch_mib)
    _, got = train(offload, how=how)
    assert same(got, wanted)
    assert offload.host_bytes[0] == 0


def test_every_order_is_asked_for():
    """Megatron#7398: a reload at the last moment does not wait for its copy out, and old data comes back silently."""
    offload = running("async", prefetch_mib=BUDGET)
    _, _ = train(offload)
    edges = offload._backend.edges
    outs = {edge.after for edge in edges if edge.after.startswith("out")}
    ins = {edge.after for edge in edges if edge.after.startswith("in")}
    assert len(ins) >= 6
    for name in outs:
        assert Edge("compute", name) in edges, "1: after what was computed"
    for name in ins:
        assert Edge("compute", name) in edges, "4: memory comes from the computing stream"
        sources = [edge.before for edge in edges if edge.after == name and edge.before.startswith("out")]
        assert len(sources) == 1, "3: after the copy out of the same bytes (Megatron#7398)"
        assert Edge(sources[0], "compute") in edges, "2: device memory was given up in order"
        assert edges.index(Edge(sources[0], "compute")) < edges.index(Edge(sources[0], name))
        assert Edge(name, "compute") in edges, "5: before the computation reads"


def test_a_host_buffer_is_written_again_after_it_was_read(monkeypatch):
    monkeypatch.setattr(VirtualBackend, "abandon", lambda *args: None)  # as on a device, where nobody waits there
    offload = running("async", prefetch_mib=1024.0)
    x = torch.randn(32, 32, requires_grad=True)
    with offload.everywhere(None):
        unused, kept = (x * 2).cos(), (x * 1).sin()
        last = (x * 3).exp()
    (kept + last).sum().backward(retain_graph=True)  # fetches what `unused` saved ahead, and never reads it
    del kept, unused, last
    with offload.everywhere(None):
        loss = (x * 3).exp().sum() + (x * 4).exp().sum() + (x * 5).exp().sum()
    edges = offload._backend.edges
    assert [edge for edge in edges if edge.before.startswith("in") and edge.after.startswith("out")]
    loss.backward()


def test_the_host_never_waits():
    offload = running("async", prefetch_mib=BUDGET)
    train(offload)
    assert not [edge for edge in offload._backend.edges if edge.after == "host"]


def test_copies_come_back_ahead_within_the_budget(monkeypatch):
    offload = running("async", prefetch_mib=BUDGET)
    ahead = []
    read = Stash.read

    def counted(stash):
        ahead.append(offload._offloader._ahead_bytes)
        return read(stash)

    monkeypatch.setattr(Stash, "read", counted)
    train(offload, steps=1)
    copies = offload.counters.copies_in
    assert max(ahead) <= BUDGET * 2**20
    assert max(ahead) > 0
    demanded = copies - sum(1 for before, after in zip(ahead, ahead[1:], strict=False) if after > before)
    assert copies >= 5
    assert demanded < copies


def test_what_all_blocks_share_does_not_lead_astray(monkeypatch):
    """Rotary factors, saved with the first block's input, are asked for by every block: the next input comes anyway."""

    class Wide(Model):
        def forward(self, x):
            x, scale = self.first(x), torch.full((1, TOKENS, WIDTH), 0.5)
            for layer in self.layers:
                x = layer(x, scale)
            return x

    model, offload, demanded = Wide(8, "non-reentrant"), running("async", prefetch_mib=BUDGET), []
    offload.attach(model, model.layers)
    fetch = offload._offloader._fetch

    def seen(stash):
        caller = sys._getframe(1).f_code.co_name
        demanded.append(caller == "unpack")
        fetch(stash)

    monkeypatch.setattr(offload._offloader, "_fetch", seen)
    model(batch()).sum().backward()
    assert demanded.count(True) <= 1
    assert len(demanded) >= 8


def test_at_least_one_tensor_is_fetched_ahead():
    offload = running("async", prefetch_mib=1e-6)
    _, got = train(offload, steps=1)
    assert same(got, expected(Model(6), batch(0)))


def test_two_blocks_at_most_are_on_the_device_in_forward():
    """Back-pressure: the computation waits for a copy rather than that memory grows."""
    offload = running("async")
    model = Model(8, "non-reentrant")
    offload.attach(model, model.layers)
    held = []

    def count(module, args):
        offloader = offload._offloader
        under_way = sum(stash.nbytes for ref in offloader._leaving if (stash := ref()) is not None)
        held.append(offloader._resident_bytes + under_way)

    for layer in model.layers:
        layer.register_forward_pre_hook(count)
    loss = model(batch()).sum()
    assert max(held) <= 2 * (INPUT_BYTES + 4)
    loss.backward()


MUTANTS = {
    "device memory is given up before the copy is done": ("give_up_device", lambda stash: stash._forget_device()),
    "the computation does not wait for what comes back": ("read", lambda stash: stash._device),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_missing_order_shows(monkeypatch, mutant):
    monkeypatch.setattr(Stash, *mutant)
    wanted = expected(Model(6), batch(1))
    _, got = train(running("async", level="all"), how="none")
    assert not same(got, wanted)


def test_poison_and_lateness_of_the_virtual_device():
    backend = VirtualBackend(late=True, poison=True)
    host, _ = backend.empty_host(8)
    source = torch.arange(8, dtype=torch.uint8)
    event = backend.copy_out(source, host, [])
    assert host.tolist() == [255] * 8, "not yet"
    del source
    backend.wait(event)
    assert host.tolist() == [255] * 8, "freed before it was read"
    source = torch.arange(8, dtype=torch.uint8)
    second = backend.copy_out(source, host, [event])
    memory, third = backend.copy_in(host, [second])
    backend.wait(third)
    assert memory.tolist() == list(range(8))
    assert backend.is_done(second)


def test_the_times_of_waits_that_nobody_reads_are_not_kept(monkeypatch):
    """A pair of events for each wait of a run would fill the memory of host and device."""

    class Timed:
        def __init__(self, enable_timing):
            self.record = lambda stream: None

        def query(self):
            return True

        def elapsed_time(self, other):
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Timed)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    backend = CudaBackend(torch.device("cuda", 0))
    under_way = SimpleNamespace(query=lambda: False)
    for _ in range(5000):
        backend.wait(under_way)
    assert len(backend._stalls) < 2000
    assert backend.waited_seconds() == pytest.approx(5.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: real streams, pinned memory, a real peak")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("how", ["none", "non-reentrant"])
def test_on_a_gpu(mode, how):
    from lightning_longctx.strategies.activation_offload import RunningOffload
    from tests.strategies.activation_offload.helpers import settings

    def step(offload):
        model = Model(8, how).cuda()
        if offload is not None:
            offload.attach(model, model.layers)
        x = torch.randn(1, 512, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        for _ in range(3):
            model.zero_grad()
            out = model.first(x)
            for layer in model.layers:
                out = layer(out, torch.full((1,), 0.5, device="cuda"))
            out.square().mean().backward()
        torch.cuda.synchronize()
        return gradients(model)

    device = torch.device("cuda", torch.cuda.current_device())
    offload = RunningOffload(settings(mode, level="all", host_limit_gib=1), device)
    assert same(step(offload), step(None))
    assert offload.host_bytes[0] == 0
    assert not offload._arena.pageable
    offload.close()
    assert offload.host_bytes[2] == 0
