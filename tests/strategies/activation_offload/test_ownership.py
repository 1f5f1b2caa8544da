"""Each graph owns its copies: any order, any number of forwards and backwards, and not one byte is left behind."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.strategies.activation_offload.helpers import Model, batch, expected, gradients, running, same

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def attached(mode, how="none", level="all", **changes):
    model = Model(how=how)
    offload = running(mode, level=level, **changes)
    offload.attach(model, model.layers)
    return model, offload


@MODES
@pytest.mark.parametrize("how", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("level", ["boundary", "all"])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_gradients_are_equal_in_every_bit(mode, how, level, keep):
    wanted = expected(Model(how=how), batch())
    model, offload = attached(mode, how, level, keep_last_blocks=keep)
    model(batch()).square().mean().backward()
    assert same(gradients(model), wanted)
    assert offload.counters.bytes_out > 0
    assert offload.host_bytes[0] == 0


@MODES
def test_two_forwards_one_unused_one_backward(mode):
    """torchtune#2709: an assertion that a tracker is empty."""
    wanted = expected(Model(), batch(2))
    model, offload = attached(mode)
    unused = model(batch(1))
    model(batch(2)).square().mean().backward()
    assert same(gradients(model), wanted)
    assert offload.host_bytes[0] > 0, "the unused graph lives"
    del unused
    assert offload.host_bytes[0] == 0


@MODES
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_forwards_in_the_order_of_a_pipeline(mode, order):
    """trl#4280, 4236: a second context before the first backward raises."""
    reference = Model()
    for seed in order:
        reference(batch(seed)).square().mean().backward()
    model, offload = attached(mode)
    losses = [model(batch(seed)).square().mean() for seed in range(3)]
    for place in order:
        losses[place].backward()
    assert same(gradients(model), gradients(reference))
    assert offload.host_bytes[0] == 0


@MODES
def test_one_backward_through_two_forwards(mode):
    """trl#4280: (a + b).backward()."""
    reference = Model()
    (reference(batch(1)).sum() + reference(batch(2)).sum()).backward()
    model, offload = attached(mode)
    (model(batch(1)).sum() + model(batch(2)).sum()).backward()
    assert same(gradients(model), gradients(reference))
    assert offload.host_bytes[0] == 0


@MODES
@pytest.mark.parametrize("how", ["none", "non-reentrant"])
def test_the_graph_is_used_twice(mode, how):
    """trl#4236: retain_graph."""
    wanted = expected(Model(how=how), batch(), passes=2)
    model, offload = attached(mode, how)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert same(gradients(model), wanted)
    del loss
    assert offload.host_bytes[0] == 0


@MODES
def test_branches_that_backward_does_not_use_leave_nothing(mode):
    """trl#5737, axolotl#3638: nodes that never run keep entries for good."""
    model, offload = attached(mode)
    for step in range(3):
        hidden = model(batch(step))
        loss, unused = hidden.square().mean(), hidden.exp().sum()
        loss.backward(retain_graph=True)
        del loss, unused, hidden
        assert offload.host_bytes[0] == 0


@MODES
def test_device_memory_of_unused_branches_is_free_after_backward(mode):
    model = Model(blocks=1)
    offload = running(mode, level="all", min_tensor_mib=0)
    x = torch.randn(64, 64, requires_grad=True)
    with offload.everywhere(model):
        shared = x * 2
        used, unused = shared.sin(), shared.cos()
    used.sum().backward(retain_graph=True)
    stashes = [saved.stash for _, ref in offload._offloader._saved if (saved := ref()) is not None]
    assert stashes
    assert not any(stash.on_device for stash in stashes)
    del stashes
    unused.sum().backward()
    assert torch.equal(x.grad, 2 * (2 * x).cos() - 2 * (2 * x).sin())


@MODES
def test_an_exception_leaves_nothing_and_hooks_are_gone(mode):
    model, offload = attached(mode)

    class StopError(Exception):
        pass

    def stop(*args):
        raise StopError

    handle = model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(StopError):
        model(batch())
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert offload.host_bytes[0] == 0
    wanted = expected(Model(), batch())
    model(batch()).square().mean().backward()
    assert same(gradients(model), wanted)


@MODES
def test_an_exception_in_backward_leaves_nothing(mode):
    model, offload = attached(mode)
    loss = model(batch())
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.sum().backward()
    del loss
    gc.collect()
    assert offload.host_bytes[0] == 0


@MODES
def test_nothing_moves_without_gradients(mode):
    model, offload = attached(mode)
    with torch.no_grad():
        without = model(batch())
    model.eval()
    with torch.inference_mode():
        model(batch())
    assert offload.counters.bytes_out == offload.counters.calls == 0
    assert torch.equal(without, Model()(batch()))


@MODES
def test_evaluation_between_forward_and_backward(mode):
    wanted = expected(Model(), batch())
    model, _ = attached(mode)
    loss = model(batch()).square().mean()
    with torch.no_grad():
        model(batch(5))
    loss.backward()
    assert same(gradients(model), wanted)


@MODES
@pytest.mark.parametrize("how", ["none", "non-reentrant"])
def test_the_users_tensors_are_as_they_were(mode, how):
    """VeOmni 0.1.12 asynchronous: hidden states that the user holds became (0,)."""
    model, offload = attached(mode, how)
    held = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: held.append((args[0], args[0].detach().clone())))
    out = model(batch())
    auxiliary = sum(tensor.square().mean() for tensor, _ in held)
    (out.square().mean() + auxiliary).backward()
    assert all(torch.equal(tensor, copy) and tensor.shape == copy.shape for tensor, copy in held)
    reference, kept = Model(how=how), []
    for layer in reference.layers:
        layer.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    (reference(batch()).square().mean() + sum(tensor.square().mean() for tensor in kept)).backward()
    assert same(gradients(model), gradients(reference))


@MODES
def test_the_users_tensors_are_not_retained(mode):
    """Once it is out, a block input lives as long as the user holds it, no longer."""
    model, _ = attached(mode, "non-reentrant", "boundary")
    storages, alive = [], []

    def count(module, args):
        storages.append(StorageWeakRef(args[0].untyped_storage()))
        alive.append(sum(not storage.expired() for storage in storages))

    for layer in model.layers:
        layer.register_forward_pre_hook(count)
    loss = model(batch()).sum()
    assert max(alive) <= 2, "the input of this block, and of the one before while its copy runs"
    loss.backward()


@pytest.mark.parametrize("kept", [True, False])
@MODES
def test_a_change_in_place_after_saving_raises(mode, kept):
    """Saved-tensor hooks switch autograd's check off: 48 came back for a true 8."""
    offload = running(mode, level="all", min_tensor_mib=1 if kept else 0)
    x = torch.full((8,), 2.0, requires_grad=True)
    with offload.everywhere(None):
        y = x * 1
        z = y * y
        view = y.view(2, 4)
        with torch.no_grad():
            view.mul_(3)
    del y
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@MODES
def test_a_change_in_place_of_something_else_does_not_raise(mode):
    offload = running(mode, level="all")
    x = torch.full((8,), 2.0, requires_grad=True)
    with offload.everywhere(None):
        y = x * 1
        z = y * y
    with torch.no_grad():
        z.mul_(5)
    z.sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 4.0))


@MODES
def test_second_derivatives(mode):
    offload = running(mode, level="all")
    x = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
    with offload.everywhere(None):
        y = (x**4).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 12 * x.detach() ** 2)
