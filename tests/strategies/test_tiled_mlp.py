"""Tiled MLPs: the same numbers, one more forward, less memory, and which modules are taken."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import ConfigurationError, LongContextFSDPStrategy, offload_activations
from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing, apply_checkpointing
from lightning_longctx.strategies.tiled_mlp import TiledMLP, apply_tiles, as_tiled_mlp, find_mlps
from tests.parity.models import CONFIGS

WIDTH, INNER, TOKENS = 8, 24, 21


class GatedMLP(nn.Module):
    """As in Llama."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.runs = []

    def forward(self, x):
        self.runs.append(x.shape[-2])
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainFFN(nn.Module):
    """As in GPT-2, with dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), dropout
        self.runs = []

    def forward(self, x):
        self.runs.append(x.shape[-2])
        return nn.functional.dropout(self.fc2(nn.functional.gelu(self.fc1(x))), self.dropout, self.training)


class Layer(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def build(kind=GatedMLP, tiles=4, dtype=torch.float64, **options):
    torch.manual_seed(0)
    plain = Layer(kind(**options)).to(dtype)
    tiled = copy.deepcopy(plain)
    apply_tiles(tiled, TiledMLP(tiles=tiles))
    return plain, tiled


def rows(dtype=torch.float64, tokens=TOKENS):
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def step(layer, x, how="none"):
    y = layer(x) if how == "none" else checkpoint(layer, x, use_reentrant=how == "reentrant")
    y.square().sum().backward()
    return y.detach(), x.grad, [parameter.grad for parameter in layer.parameters()]


def close(ours, theirs, rtol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("how", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("tiles", [1, 2, 4, 21, 30])
@pytest.mark.parametrize("kind", [GatedMLP, PlainFFN])
def test_values_and_gradients_are_those_of_the_whole(kind, tiles, how):
    plain, tiled = build(kind, tiles)
    for ours, theirs in zip(step(tiled, rows(), how), step(plain, rows(), how), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(("how", "expected"), [("none", 2), ("non-reentrant", 2), ("reentrant", 3)])
def test_one_more_forward_and_none_more_under_checkpointing(how, expected):
    """Checkpointing alone takes two; its repetition stops at the saved input of the tiles."""
    _, tiled = build(tiles=4)
    step(tiled, rows(), how)
    assert sum(tiled.mlp.runs) == expected * TOKENS
    assert max(tiled.mlp.runs) == 6
    plain, _ = build()
    step(plain, rows(), how)
    assert sum(plain.mlp.runs) == (1 if how == "none" else 2) * TOKENS


def test_the_number_of_tiles_does_not_depend_on_tokens():
    """Ranks with other rows run as many tiles, empty ones too, so that nobody waits."""
    for tokens in (3, 21, 64):
        _, tiled = build(tiles=5)
        step(tiled, rows(tokens=tokens))
        assert len(tiled.mlp.runs) == 2 * 5


def test_by_default_a_tile_is_as_long_as_the_input_is_wide_and_at_least_1024():
    _, tiled = build(tiles=0, dtype=torch.float32)
    with torch.no_grad():
        tiled(rows(torch.float32, 5000))
    assert tiled.mlp.runs == [1000] * 5


def test_gradients_are_handed_over_once():
    _, tiled = build()
    calls = []
    for parameter in tiled.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    step(tiled, rows())
    assert len(calls) == len(set(map(id, calls))) == len(list(tiled.parameters()))


def test_gradients_of_coarse_weights_are_added_in_float32():
    errors = {}
    for tiles in (1, 64):
        plain, tiled = build(tiles=tiles, dtype=torch.bfloat16)
        exact = copy.deepcopy(plain).double()
        x = rows(torch.bfloat16, 640)
        step(tiled, x)
        step(exact, x.detach().double().requires_grad_())
        ours, theirs = tiled.mlp.down_proj.weight.grad.double(), exact.mlp.down_proj.weight.grad
        errors[tiles] = float((ours - theirs).norm() / theirs.norm())
    assert errors[64] <= 1.1 * errors[1]


@pytest.mark.parametrize("frozen", ["input", "weights", "down_proj"])
def test_what_needs_no_gradient_gets_none(frozen):
    plain, tiled = build()
    for layer in (plain, tiled):
        if frozen != "input":
            layer.mlp.requires_grad_(False)
            layer.mlp.gate_proj.requires_grad_(frozen == "down_proj")
            layer.mlp.up_proj.requires_grad_(frozen == "down_proj")
        else:
            layer.norm.requires_grad_(False)
    x = [rows().detach().requires_grad_(frozen != "input") for _ in range(2)]
    for ours, theirs in zip(step(tiled, x[0]), step(plain, x[1]), strict=True):
        close(ours, theirs) if ours is not None else None
        assert (ours is None) == (theirs is None)


def test_dropout_repeats_in_backward():
    _, tiled = build(PlainFFN, dropout=0.5)
    x = rows()
    torch.manual_seed(3)
    y, grad, _ = step(tiled, x)
    torch.manual_seed(3)
    moved = rows().detach() + 1e-6 * torch.eye(TOKENS, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        change = float(tiled(moved).square().sum() - y.square().sum())
    assert change == pytest.approx(float((grad * 1e-6 * torch.eye(TOKENS, WIDTH)).sum()), rel=1e-3)


def test_autocast_is_that_of_the_forward():
    plain, tiled = build(dtype=torch.float32)
    results = []
    for layer in (tiled, plain):
        x = rows(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


class Peak(TorchDispatchMode):
    """Largest number of bytes of storages that live at once, made inside."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key, nbytes):
        self.seen.discard(key)
        self.live -= nbytes


def test_peak_memory_is_that_of_one_tile():
    peaks = {}
    for tiles in (1, 16):
        torch.manual_seed(0)
        layer = Layer(GatedMLP())
        apply_tiles(layer, TiledMLP(tiles=tiles))
        x = torch.randn(1, 4096, WIDTH, requires_grad=True)
        with Peak() as peak:
            layer(x).sum().backward()
        peaks[tiles] = peak.peak
    inner = 4096 * INNER * 4
    assert peaks[1] > 4 * inner, "gate, its activation, up, their product"
    assert peaks[16] < peaks[1] - 3 * inner


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_under_offload(mode):
    plain, tiled = build()
    wanted = step(plain, rows())
    with offload_activations({"mode": mode, "min_tensor_mib": 0}, tiled) as offload:
        got = step(tiled, rows())
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs)
    assert offload.counters.bytes_out > 0


# -- which modules ---------------------------------------------------------------------------------------------------


def hugging_face(name):
    config = dict(CONFIGS[name])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


@pytest.mark.parametrize(("name", "found"), [("llama", 2), ("qwen3", 2), ("qwen3_moe", 0)])
def test_auto_takes_mlps_and_leaves_experts_alone(name, found):
    model = hugging_face(name)
    assert len(find_mlps(model)) == found
    if not found:
        with pytest.raises(ConfigurationError, match="must find MLPs"):
            apply_tiles(model, TiledMLP())


class FusedMLP(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up)


class MLPWithNorm(GatedMLP):
    """Something else has weights."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class MLPOfTwo(GatedMLP):
    """Takes two tensors."""

    def forward(self, x, y):
        return x


class Attention(nn.Module):
    """Square matrices, and no name of an MLP."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return x


def test_auto_by_name_shape_and_signature():
    model = nn.ModuleList([GatedMLP(), PlainFFN(), FusedMLP(), MLPWithNorm(), MLPOfTwo(), Attention()])
    assert [type(found) for found in find_mlps(model)] == [GatedMLP, PlainFFN, FusedMLP]


def test_modules_by_name():
    model = nn.ModuleList([Layer(GatedMLP()), Layer(PlainFFN())])
    assert [type(found) for found in apply_tiles(model, as_tiled_mlp(["PlainFFN"]))] == [PlainFFN]
    assert [type(found) for found in apply_tiles(model, as_tiled_mlp(["0.mlp"]))] == [GatedMLP]
    with pytest.raises(ConfigurationError, match="must name submodules"):
        apply_tiles(model, as_tiled_mlp(["LlamaMLP"]))


def test_a_module_that_routes_is_refused():
    with pytest.raises(ConfigurationError, match="must not name modules that route tokens"):
        apply_tiles(hugging_face("qwen3_moe"), as_tiled_mlp(["Qwen3MoeSparseMoeBlock"]))


def test_modules_that_do_not_fit_are_refused_when_they_run():
    model = nn.ModuleList([MLPOfTwo(), nn.Linear(2, 2), nn.Flatten()])
    apply_tiles(model, TiledMLP(["MLPOfTwo", "Flatten"], tiles=2))
    with pytest.raises(ConfigurationError, match="take one tensor"):
        model[0](torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ConfigurationError, match="must keep the shape"), torch.no_grad():
        model[2](torch.ones(2, 4, 2))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("all", "none, auto or a list"),
        ([], "none, auto or a list"),
        ({"tiles": -1}, "tiles"),
        ({"tiles": True}, "tiles"),
    ],
    ids=str,
)
def test_settings_are_checked(value, words):
    with pytest.raises(ConfigurationError, match=words):
        LongContextFSDPStrategy(tiled_mlp=value)


def test_settings_of_the_strategy():
    assert LongContextFSDPStrategy().tiled_mlp.modules == "none"
    assert LongContextFSDPStrategy(tiled_mlp="auto").tiled_mlp == TiledMLP()
    assert LongContextFSDPStrategy(tiled_mlp=["LlamaMLP"]).tiled_mlp.modules == ["LlamaMLP"]
    assert LongContextFSDPStrategy(tiled_mlp={"tiles": 4}).tiled_mlp == TiledMLP("auto", 4)


def test_a_second_derivative_is_an_error_and_not_a_wrong_number():
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    apply_tiles(nn.ModuleList([mlp]), TiledMLP(["Sequential"], tiles=2))
    x = torch.ones(2, 4, requires_grad=True)
    (first,) = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.square().sum().backward()


def test_a_whole_model_with_checkpointing_gives_the_same_gradients():
    torch.manual_seed(0)
    plain = hugging_face("llama").double()
    tiled = copy.deepcopy(plain)
    apply_tiles(tiled, TiledMLP(tiles=3))
    apply_checkpointing(tiled, list(tiled.model.layers), ActivationCheckpointing("full"))
    for model in (plain, tiled):
        model(input_ids=torch.arange(30)[None], use_cache=False).logits.square().mean().backward()
    for ours, theirs in zip(tiled.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad, rtol=1e-9)
