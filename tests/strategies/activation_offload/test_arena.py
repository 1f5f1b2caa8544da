"""Host memory: exact sizes, one hard limit, buffers that come back from anywhere."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from lightning_longctx import ConfigurationError
from lightning_longctx.strategies.activation_offload.arena import HostArena
from lightning_longctx.strategies.activation_offload.backend import check_pinned_settings
from lightning_longctx.strategies.activation_offload.host_memory import available_memory, host_limit
from lightning_longctx.strategies.activation_offload.virtual import VirtualBackend
from lightning_longctx.units import GIB, MIB
from tests.strategies.activation_offload.helpers import Model, batch, expected, gradients, running, same, settings


def arena(limit, slab=4096, host_device="cpu"):
    return HostArena(VirtualBackend(host_device=host_device), limit, slab)


def test_a_buffer_takes_what_it_needs():
    """pytorch#150517, 171662, vllm#56410, sglang#37285: pinned buffers of a power of two."""
    host = arena(64 * GIB, 64 * MIB, host_device="meta")
    size = int(1.25 * GIB)
    buffers = [host.reserve(size) for _ in range(3)]
    assert host.live == 3 * size
    assert host.reserved <= 3 * size + 64 * MIB
    assert all(buffer.memory.numel() == size for buffer in buffers)


def test_the_limit_counts_live_and_idle_memory():
    host = arena(10 * 512, slab=512)
    first, second = host.reserve(6 * 512), host.reserve(4 * 512)
    assert host.reserve(1) is None
    host.release(first, ())
    assert host.live == 4 * 512
    assert host.reserved <= 10 * 512
    assert host.reserve(7 * 512) is None
    third = host.reserve(5 * 512)
    assert third is not None
    host.release(second, ())
    host.release(third, ())
    assert host.reserve(10 * 512) is not None, "idle slabs are given back to make room for a larger one"
    assert host.peak == 10 * 512


def test_neighbours_become_one_again():
    host = arena(8 * 512, 8 * 512)
    buffers = [host.reserve(512) for _ in range(8)]
    for place in (1, 3, 5, 7, 0, 2, 6, 4):
        host.release(buffers[place], ())
    assert host.live == 0
    assert host.reserve(8 * 512) is not None
    assert host.reserved == 8 * 512


def test_live_buffers_do_not_overlap():
    host, generator = arena(1 * MIB), torch.Generator().manual_seed(0)
    live = {}
    for number in range(300):
        size = int(torch.randint(1, 9000, (1,), generator=generator))
        buffer = host.reserve(size)
        if buffer is not None:
            buffer.memory.fill_(number % 251)
            live[number] = buffer
        if len(live) > 20 or buffer is None:
            gone = next(iter(live))
            assert (live[gone].memory == gone % 251).all()
            host.release(live.pop(gone), ())
    assert host.live == sum(buffer.span[1] - buffer.span[0] for buffer in live.values())


def test_a_buffer_is_written_after_the_events_of_its_last_use():
    backend = VirtualBackend(late=True)
    host = HostArena(backend, 4096, 4096)
    buffer = host.reserve(4096)
    event = backend.copy_out(torch.zeros(4096, dtype=torch.uint8), buffer.memory, ())
    host.release(buffer, (event,))
    assert host.reserve(4096).after == (event,)
    backend.finish(event)
    host.release(buffer, (event,))
    host._live += 4096  # the same buffer twice, for the test
    assert host.reserve(4096).after == ()


def test_buffers_come_back_from_other_threads_and_the_collector():
    host = arena(1 * MIB)
    for _ in range(50):
        cycle = [host.reserve(1000)]
        cycle.append(cycle)

        class Holder:
            def __init__(self, buffer):
                self.buffer, self.me = buffer, self

            def __del__(self):
                host.release(self.buffer, ())

        Holder(cycle[0])
    threads = [threading.Thread(target=lambda: host.release(host.reserve(500), ())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert host.live == 0


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_does_not_fit_stays_and_one_warning_says_so(mode):
    wanted = expected(Model(), batch())
    model, offload = Model(), running(mode, level="all", host_limit_gib=4096 / GIB)
    offload.attach(model, model.layers)
    with pytest.warns(UserWarning, match="host memory for saved activations is full") as warned:
        model(batch()).square().mean().backward()
    model.zero_grad()
    model(batch()).square().mean().backward()  # a second warning would be an error
    assert len(warned) == 1
    assert same(gradients(model), wanted)
    assert offload.host_bytes[1] <= 4096
    assert offload.host_bytes[2] <= 4096
    assert offload.counters.stayed["no_room"][0] > 0


def test_strict_raises():
    model, offload = Model(), running("sync", level="all", host_limit_gib=512 / GIB, strict=True)
    offload.attach(model, model.layers)
    with pytest.raises(RuntimeError, match="strict.*is full"):
        model(batch())


@pytest.mark.parametrize("strict", [False, True])
def test_memory_that_cannot_be_pinned(strict, monkeypatch):
    monkeypatch.setattr(VirtualBackend, "empty_host", lambda self, n: (torch.empty(n, dtype=torch.uint8), False))
    model, offload = Model(), running("async", level="all", strict=strict)
    offload.attach(model, model.layers)
    if strict:
        with pytest.raises(RuntimeError, match="could not be pinned"):
            model(batch())
    else:
        with pytest.warns(UserWarning, match="could not be pinned") as warned:
            model(batch()).sum().backward()
        assert len(warned) == 1


def test_the_container_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  2000000 kB\nMemAvailable:  1000000 kB\n")
    groups = tmp_path / "groups"
    groups.mkdir()
    (groups / "memory.max").write_text(f"{600 * MIB}\n")
    (groups / "memory.current").write_text(f"{200 * MIB}\n")
    assert available_memory(meminfo, groups) == (600 * MIB, 400 * MIB)
    (groups / "memory.max").write_text("max\n")
    assert available_memory(meminfo, groups)[1] == 1000000 * 1024
    first = groups / "memory"
    first.mkdir()
    (first / "memory.limit_in_bytes").write_text(f"{500 * MIB}\n")
    (first / "memory.usage_in_bytes").write_text(f"{100 * MIB}\n")
    assert available_memory(meminfo, groups) == (500 * MIB, 400 * MIB)


def test_the_limit_of_a_rank():
    assert host_limit(settings(), 4, (100 * GIB, 50 * GIB)) == int(50 * GIB * 0.8 / 4)
    assert host_limit(settings(host_limit_gib=20), 4, (100 * GIB, 50 * GIB)) == 20 * GIB
    with pytest.raises(ConfigurationError, match=r"must fit the host's .* 100.0 GiB, but got 30 GiB x 4 ranks"):
        host_limit(settings(host_limit_gib=30), 4, (100 * GIB, 50 * GIB))


def test_a_pair_of_pinned_settings_that_overflows_is_refused():
    """pytorch#192722: a smaller block is handed out."""
    bad = "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:128"
    with pytest.raises(ConfigurationError, match="PYTORCH_CUDA_ALLOC_CONF"):
        check_pinned_settings({"PYTORCH_CUDA_ALLOC_CONF": bad})
    check_pinned_settings({"PYTORCH_ALLOC_CONF": bad.replace(":64", ":128")})
    check_pinned_settings({"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:128"})
    check_pinned_settings({})
