"""What never moves: weights in any form, small, foreign and wrapped tensors; and each storage goes once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx.strategies.activation_offload.identity import InPlaceCheck, flat_bytes, range_of, view_of
from tests.helpers.pool import run_ranks
from tests.parity.models import CONFIGS
from tests.strategies.activation_offload.helpers import WIDTH, Block, Model, batch, running

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


class Moves:
    """Storages that an offload copies out, seen at its backend."""

    def __init__(self, offload):
        self.sources = []
        copy_out = offload._backend.copy_out

        def seen(source, host, after):
            self.sources.append((source.untyped_storage().data_ptr(), source.untyped_storage().nbytes()))
            return copy_out(source, host, after)

        offload._backend.copy_out = seen

    def of(self, tensors):
        pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [entry for entry in self.sources if entry[0] in pointers]


class LoRA(nn.Module):
    """A frozen weight beside a small trained one."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def lora_model():
    model = Model()
    for layer in model.layers:
        layer.qkv = LoRA(layer.qkv)
        layer.down.requires_grad_(False)
    return model


def detached_weights():
    """A block that hides that its weight is one: a detached view, transposed."""

    class Hidden(Block):
        def inner(self, x, scale):
            return x + x.exp() @ self.down.weight.detach().t() * scale

    model = Model(blocks=0)
    model.layers.extend(Hidden() for _ in range(3))
    return model


def mixture():
    config = dict(CONFIGS["qwen3_moe"])
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@MODES
@pytest.mark.parametrize("build", [Model, lora_model, detached_weights])
def test_no_byte_of_a_parameter_moves(mode, build):
    """Seen in VeOmni: weights were copied each step, those of experts and frozen ones too."""
    model, offload = build(), running(mode, level="all")
    offload.attach(model, model.layers)
    moves = Moves(offload)
    model(batch()).sum().backward()
    assert moves.sources
    assert moves.of(model.parameters()) == []
    assert offload.counters.stayed["weights"][0] > 0


@MODES
@pytest.mark.parametrize("frozen", [False, True])
def test_no_byte_of_an_expert_moves(mode, frozen):
    """VeOmni synchronous: 64 MiB of expert weights beside 46 MiB of activations, every step."""
    model, offload = mixture(), running(mode, level="all")
    if frozen:
        model.requires_grad_(False)
        model.model.norm.requires_grad_(True)
        model.model.layers[0].input_layernorm.requires_grad_(True)
    offload.attach(model, model.model.layers)
    moves = Moves(offload)
    model(input_ids=torch.arange(12)[None], use_cache=False).logits.sum().backward()
    assert moves.sources
    assert moves.of([*model.parameters(), *model.buffers()]) == []


def _gathered(units, mixed):
    dist.init_process_group("gloo")
    model, offload = lora_model(), running("async", level="all")
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
    for layer in model.layers:
        for unit in (layer.qkv, layer) if units == "nested" else (layer,):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    offload.attach(model, model.layers)
    moves, storages = Moves(offload), []
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: storages.extend(module.parameters(recurse=False)))
    model(batch()).sum().backward()
    dist.destroy_process_group()
    assert storages
    gathered = [p for p in storages if p.untyped_storage().nbytes()]
    return len(moves.sources), moves.of(gathered), offload.host_bytes[0]


@pytest.mark.distributed
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("units", ["layers", "nested"])
def test_no_byte_of_a_gathered_weight_moves(units, mixed):
    """TRL compares with the sharded parameters and copies views of gathered ones."""
    for copies, weights, left in run_ranks(_gathered, 2, units, mixed):
        assert copies > 0
        assert weights == []
        assert left == 0


def _views_of_one_storage(x):
    h = x * 1
    a, b, c = h.chunk(3, dim=1)  # [16, 6], [16, 6], [16, 4]
    loss = (h @ h.t()).sum() + h.sin().sum() + (a * a).sum() + (b[:, :4] * c).sum()
    return loss + (h[:1].expand(16, 16) * h.t()).sum()


@MODES
def test_one_storage_goes_once(mode):
    """VeOmni synchronous: 22 % of the bytes are second copies of one storage."""
    offload = running(mode, level="all")
    x = torch.randn(16, 16, requires_grad=True)
    with offload.everywhere(None):
        loss = _views_of_one_storage(x)
    loss.backward()
    reference = x.detach().clone().requires_grad_()
    _views_of_one_storage(reference).backward()
    assert torch.equal(x.grad, reference.grad)
    counters = offload.counters
    assert counters.duplicate_bytes >= 4 * x.nbytes
    assert (counters.bytes_out, counters.copies_out) == (x.nbytes, 1), "all of them are views of h"
    assert (counters.bytes_in, counters.copies_in) in {(x.nbytes, 1), (0, 0)}, "the last one may not have left yet"


VIEWS = {
    "whole": lambda h: h,
    "transposed": lambda h: h.t(),
    "a part": lambda h: h[3:5],
    "a column": lambda h: h[:, 7],
    "a corner of it, transposed": lambda h: h[5:9, 2:4].t(),
    "expanded": lambda h: h[:1].expand(512, 64),
    "expanded scalar": lambda h: h[4, 4].expand(3, 3),
    "strided": lambda h: h[::3, ::2],
    "another dtype": lambda h: h.view(torch.int32),
    "bytes": lambda h: h.view(torch.uint8)[:, 5:9],
    "three dimensions": lambda h: h.view(16, 32, 64).permute(2, 0, 1),
    "the end": lambda h: h[-1, -3:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_are_rebuilt_exactly(view):
    h = torch.randn(512, 64)
    tensor = view(h)
    span = range_of(tensor)
    flat = flat_bytes(tensor, span).clone()
    like = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    again = view_of(flat, span.start, like)
    assert torch.equal(again, tensor)
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    offset, shifted = tensor.data_ptr() - h.data_ptr(), again.data_ptr() - flat.data_ptr()
    assert (offset - shifted) % 512 == 0, "kernels choose by alignment"


def test_a_part_of_a_storage_moves_alone():
    h = torch.randn(512, 64)
    assert range_of(h[:10]).nbytes == 10 * 64 * 4
    assert range_of(h[:, :32]).nbytes == h.nbytes, "its extent covers the storage"
    assert range_of(h[1:2].expand(512, 64)).nbytes <= 64 * 4 + 512


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn]
)
def test_dtypes(dtype):
    tensor = torch.randn(32, 32).to(dtype)
    span = range_of(tensor)
    like = (dtype, tuple(tensor.shape), tensor.stride(), 0)
    again = view_of(flat_bytes(tensor, span).clone(), span.start, like)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


@MODES
def test_a_transposed_view_is_not_taken_for_the_whole(mode):
    """ms-swift#10157: a key of pointer and dtype merges the two."""
    offload = running(mode, level="all")
    x = torch.randn(6, 6, requires_grad=True)
    with offload.everywhere(None):
        h = x * 1
        loss = (h * h.t().exp()).sum() + (h.t() @ h).sum()
    loss.backward()
    reference = x.detach().clone().requires_grad_()
    h = reference * 1
    ((h * h.t().exp()).sum() + (h.t() @ h).sum()).backward()
    assert torch.equal(x.grad, reference.grad)


@MODES
def test_memory_that_is_used_again_is_another_storage(mode):
    """A memo of pointers that outlives its tensors returns old data: 178 for 182."""
    offload = running(mode, level="all")
    x = torch.arange(8.0, requires_grad=True)
    total = 0.0
    for factor in range(1, 6):
        with offload.everywhere(None):
            h = x * factor
            loss = (h * h).sum()
        del h
        loss.backward()
        total += 2 * factor**2
    assert torch.equal(x.grad, total * x.detach())


@MODES
def test_a_changed_storage_goes_again(mode):
    offload = running(mode, level="all")
    x = torch.arange(1.0, 9.0, requires_grad=True)
    with offload.everywhere(None):
        h = (x * 1).detach()
        first = (x * h).sum()
        first_grad = torch.autograd.grad(first, x)[0]
        h.add_(1)
        second = (x * h).sum()
    assert torch.equal(first_grad, torch.arange(1.0, 9.0))
    assert torch.equal(torch.autograd.grad(second, x)[0], torch.arange(2.0, 10.0))


@MODES
def test_small_tensors_stay(mode):
    offload = running(mode, level="all", min_tensor_mib=0.5)
    x = torch.randn(400, 400, requires_grad=True)  # 0.61 MiB
    y = torch.randn(200, 200, requires_grad=True)
    with offload.everywhere(None):
        loss = x.exp().sum() + y.exp().sum()
    assert offload.counters.bytes_out == x.nbytes
    assert offload.counters.stayed == {"small": [1, y.nbytes]}
    loss.backward()
    assert torch.equal(y.grad, y.detach().exp())


def test_tensors_of_another_device_and_sparse_ones_stay():
    offload = running("sync", level="all")
    offload._backend.device = torch.device("meta")  # then the host's tensors are elsewhere
    x = torch.randn(4, 4, requires_grad=True)
    with offload.everywhere(None):
        x.exp().sum().backward()
        (torch.eye(4).to_sparse() @ x).sum().backward()
    assert offload.counters.bytes_out == 0
    assert {"elsewhere", "wrapped"} <= offload.counters.stayed.keys()


def test_two_models_of_one_class():
    """Class-level patches offload every instance."""
    one, other, offload = Model(), Model(), running("sync", level="all")
    offload.attach(one, one.layers)
    other(batch()).sum().backward()
    assert offload.counters.calls == 0
    one(batch()).sum().backward()
    assert offload.counters.calls == 4


def test_wrappers_come_off():
    model, offload = Model(), running("sync", level="all")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    detach = offload.attach(model, model.layers)
    detach()
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: entry.keys() for name, entry in before.items()
    }


def test_the_check_in_place_keeps_no_memory():
    big = torch.zeros(1024)
    check = InPlaceCheck(big)
    assert check._probe.untyped_storage().nbytes() == 0
    check.check()
    big[3] = 1
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        check.check()
