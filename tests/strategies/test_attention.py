"""The attention cores: values against a dense mask, leakage, causality, windows, what each refuses, and who is chosen.

Kernels that need a GPU run there only; here their arguments are compared with what the exact core gets, through
stand-ins that compute from those arguments alone.
"""

from __future__ import annotations

import math
import sys
import types
import warnings

import pytest
import torch

from lightning_longctx import BatchContractError, ConfigurationError, ulysses_attention
from lightning_longctx.batch import HostBounds, PackedSequence
from lightning_longctx.strategies import varlen_attention
from lightning_longctx.strategies.attention import CORES, choose_core
from lightning_longctx.strategies.document_attention import DocumentAttention
from lightning_longctx.strategies.flex_attention import FlexAttention, document_mask
from lightning_longctx.strategies.varlen_attention import FlashAttention, TorchVarlenAttention

BOUNDS = [0, 5, 6, 13]


def packed_of(bounds):
    longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    return PackedSequence(torch.tensor(bounds, dtype=torch.int32), longest, HostBounds(bounds))


def tensors(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=dtype) for h in (heads, kv_heads, kv_heads)]


def allowed_of(bounds, window):
    """[T, T]: written from the definition, token by token."""
    total = bounds[-1]
    document = [next(d for d in range(len(bounds) - 1) if t < bounds[d + 1]) for t in range(total)]
    rows = [
        [document[q] == document[k] and k <= q and (window is None or q - k < window) for k in range(total)]
        for q in range(total)
    ]
    return torch.tensor(rows)


def dense(query, key, value, bounds, scale, window):
    copies = query.shape[1] // key.shape[1]
    query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    scores = query @ key.repeat_interleave(copies, 0).transpose(-1, -2) * scale
    weights = scores.masked_fill(~allowed_of(bounds, window), -math.inf).softmax(-1)
    return (weights @ value.repeat_interleave(copies, 0)).transpose(0, 1)


def flex_on_the_host(query, key, value, packed, scale, window):
    """FlexAttention without its compiled kernel: the same block mask and the same call."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return FlexAttention()(query, key, value, packed, scale, window)


RUNS_ON_CPU = {"documents": DocumentAttention(), "flex": flex_on_the_host}


@pytest.mark.parametrize("core", RUNS_ON_CPU)
@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_core_equals_a_dense_mask(core, window, kv_heads):
    query, key, value = tensors(13, 4, kv_heads)
    got = RUNS_ON_CPU[core](query, key, value, packed_of(BOUNDS), 0.25, window)
    torch.testing.assert_close(got, dense(query, key, value, BOUNDS, 0.25, window))


@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 200, 1500])
def test_a_window_is_exact_across_the_blocks_of_a_long_document(window):
    bounds = [0, 40, 340, 341]
    query, key, value = tensors(341, 2, 1, 4)
    for part in (query, key, value):
        part.requires_grad_()
    outputs = [
        DocumentAttention()(query, key, value, packed_of(bounds), 0.5, window),
        dense(query, key, value, bounds, 0.5, window),
    ]
    torch.testing.assert_close(*outputs)
    probe = torch.randn_like(outputs[0])
    ours, theirs = (torch.autograd.grad(out, (query, key, value), probe) for out in outputs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("window", [None, 3, 130])
@pytest.mark.parametrize("core", RUNS_ON_CPU)
def test_a_core_leaks_nothing_and_looks_back_only(core, window):
    bounds = [0, 10, 310, 330]
    run, packed = RUNS_ON_CPU[core], packed_of(bounds)
    before_in = tensors(330, dtype=torch.float32)
    after_in = [part.clone() for part in before_in]
    for part in after_in:
        part[200] += 1.0
    before, after = run(*before_in, packed, 0.3, window), run(*after_in, packed, 0.3, window)
    assert torch.equal(before[:200], after[:200]), "the first document, and the past of its own"
    assert torch.equal(before[310:], after[310:]), "the document behind it"
    reached = (before[200:310] != after[200:310]).flatten(1).any(1)
    assert reached[: window or 110].all()
    assert not reached[window or 110 :].any(), "the window ends"


def test_host_bounds_spare_the_device():
    """On a device that cannot be read (meta), the bounds of the batch are enough."""
    query, key, value = tensors(13)
    packed = PackedSequence(torch.empty(4, dtype=torch.int32, device="meta"), 7, HostBounds(BOUNDS))
    expected = dense(query, key, value, BOUNDS, 0.25, None)
    torch.testing.assert_close(DocumentAttention()(query, key, value, packed, 0.25, None), expected)
    with pytest.raises(NotImplementedError):
        DocumentAttention()(query, key, value, packed._replace(host=None), 0.25, None)


def test_a_block_mask_is_made_once_a_row(monkeypatch):
    from torch.nn.attention import flex_attention as module

    calls = []
    make = module.create_block_mask

    def counted(*args, **kwargs):
        calls.append(args)
        return make(*args, **kwargs)

    from lightning_longctx.strategies import flex_attention

    flex_attention._function.cache_clear()
    monkeypatch.setattr(module, "create_block_mask", counted)
    packed = packed_of(BOUNDS)
    for _layer in range(3):
        flex_on_the_host(*tensors(13), packed, 0.25, None)
    flex_on_the_host(*tensors(13), packed, 0.25, 3)
    flex_on_the_host(*tensors(13), packed_of(BOUNDS), 0.25, None)
    flex_attention._function.cache_clear()
    assert len(calls) == 3


@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_mask_rule_is_that_of_the_definition(window):
    rule = document_mask(torch.tensor(BOUNDS, dtype=torch.int32), 13, window)
    at = torch.arange(13)
    zero = torch.tensor(0)
    assert torch.equal(rule(zero, zero, at[:, None], at[None]), allowed_of(BOUNDS, window))


# -- kernels that need a GPU -----------------------------------------------------------------------------------------


def stand_in(query, key, value, bounds, bounds_again, longest, longest_again, *, scale, window):
    """What a variable-length kernel computes, from its own arguments (flash-attn's convention of windows)."""
    assert bounds is bounds_again
    assert longest == longest_again == int(bounds.diff().max())
    assert window[1] == 0, "nothing to the right"
    return dense(query, key, value, bounds.tolist(), scale, None if window[0] < 0 else window[0] + 1)


def flash_stand_in(*args, dropout_p, softmax_scale, causal, window_size):
    assert causal
    assert dropout_p == 0.0
    return stand_in(*args, scale=softmax_scale, window=window_size)


def varlen_stand_in(*args, scale, window_size, enable_gqa):
    assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
    return stand_in(*args, scale=scale, window=window_size)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
def test_kernels_get_the_arguments_of_the_exact_core(name, window, monkeypatch):
    fake = types.ModuleType("flash_attn")
    fake.flash_attn_varlen_func = flash_stand_in
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    monkeypatch.setattr(varlen_attention, "_torch_varlen", lambda: varlen_stand_in)
    query, key, value = tensors(13)
    packed = packed_of(BOUNDS)
    got = CORES[name](query, key, value, packed, 0.25, window)
    torch.testing.assert_close(got, DocumentAttention()(query, key, value, packed, 0.25, window))


def test_this_torch_has_the_kernel_with_all_arguments():
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 13):
        pytest.skip("older releases lack some of them")
    assert varlen_attention._torch_varlen() is not None


@pytest.mark.parametrize(
    ("name", "reason"), [("flash_attn", "CUDA device"), ("varlen", "CUDA device"), ("flex", "no backward on a CPU")]
)
def test_kernels_are_refused_on_a_cpu(name, reason):
    query = torch.randn(1, 4, 13, 8)
    with pytest.raises(ConfigurationError, match=f"attention core `{name}`.*{reason}.*`documents`"):
        ulysses_attention(query, query, query, packed_of(BOUNDS), core=name)


def test_heads_of_an_odd_width_are_left_to_the_exact_core(monkeypatch):
    """PyTorch's kernel pads nothing and fails on them; `auto` must not take it."""
    monkeypatch.setattr(varlen_attention, "_refuses", lambda query, value: None)
    monkeypatch.setattr(varlen_attention, "_torch_varlen", lambda: varlen_stand_in)
    monkeypatch.setattr(FlashAttention, "refuses", lambda *args: "not installed")
    assert TorchVarlenAttention().refuses(*[torch.randn(13, 4, 64)] * 2, None) is None
    odd = [torch.randn(13, 4, 12)] * 2
    assert "multiple of 8" in TorchVarlenAttention().refuses(*odd, None)
    assert choose_core("auto", *odd, None) is CORES["documents"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", ["flash_attn", "varlen", "flex"])
def test_kernels_equal_the_exact_core_on_a_gpu(name, window):
    bounds = [0, 300, 301, 1024]
    parts = [part.cuda().requires_grad_() for part in tensors(1024, 8, 2, 64, torch.bfloat16)]
    packed = PackedSequence(torch.tensor(bounds, dtype=torch.int32, device="cuda"), 723, HostBounds(bounds))
    reason = CORES[name].refuses(parts[0], parts[2], window)
    if reason is not None:
        pytest.skip(reason)
    outputs = [core(*parts, packed, 0.125, window) for core in (CORES[name], DocumentAttention())]
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)
    ours, theirs = (torch.autograd.grad(out.float().square().sum(), parts) for out in outputs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


# -- choosing --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_exact_core_on_a_cpu():
    query, _, value = tensors(13)
    assert choose_core("auto", query, value, None) is CORES["documents"]


@pytest.mark.parametrize("able", ["flash_attn", "varlen"])
def test_auto_takes_the_fastest_that_can(able, monkeypatch):
    kinds = {"flash_attn": FlashAttention, "varlen": TorchVarlenAttention}
    monkeypatch.setattr(kinds[able], "refuses", lambda *args: None)
    query, _, value = tensors(13)
    assert choose_core("auto", query, value, None) is CORES[able]


def test_an_unknown_core_is_refused():
    query = torch.randn(1, 4, 13, 8)
    with pytest.raises(ConfigurationError, match="must be one of auto, flash_attn, varlen, flex, documents"):
        ulysses_attention(query, query, query, packed_of(BOUNDS), core="sdpa")


# -- the call --------------------------------------------------------------------------------------------------------


def test_bounds_that_do_not_fit_the_tokens_are_refused():
    query = torch.randn(1, 2, 6, 4)
    with pytest.raises(BatchContractError, match="must end at the row's length, 6 local tokens x 1 rank"):
        ulysses_attention(query, query, query, PackedSequence(torch.tensor([0, 12], dtype=torch.int32), 12))


def test_several_rows_are_refused():
    query = torch.randn(2, 2, 6, 4)
    with pytest.raises(BatchContractError, match="must be one row"):
        ulysses_attention(query, query, query, PackedSequence(torch.tensor([0, 6], dtype=torch.int32), 6))


def test_heads_that_do_not_divide_are_refused():
    query, key = torch.randn(1, 4, 6, 4), torch.randn(1, 3, 6, 4)
    with pytest.raises(BatchContractError, match="4 query heads and 3"):
        ulysses_attention(query, key, key, PackedSequence(torch.tensor([0, 6], dtype=torch.int32), 6))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_token_is_refused(window):
    query = torch.randn(1, 2, 6, 4)
    with pytest.raises(ConfigurationError, match="`window` must be positive"):
        ulysses_attention(query, query, query, packed_of([0, 6]), window=window)


def test_values_of_another_width_are_attended_to():
    query, key, value = tensors(13)
    value = torch.randn(13, 2, 5, dtype=torch.float64)
    out = ulysses_attention(*(part.transpose(0, 1)[None] for part in (query, key, value)), packed_of(BOUNDS))
    torch.testing.assert_close(out[0].transpose(0, 1), dense(query, key, value, BOUNDS, 8**-0.5, None))


def test_a_compiled_block_breaks_its_graph_at_the_attention():
    packed, query = packed_of(BOUNDS), torch.randn(1, 2, 13, 4)

    def block(x):
        return ulysses_attention(x * 2, x, x, packed) + 1

    compiled = torch.compile(block, backend="eager")
    torch.testing.assert_close(compiled(query), block(query))
