"""The chunked loss against PyTorch's cross entropy on the whole row's logits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.errors import BatchContractError, ConfigurationError
from lightning_longctx.loss import causal_lm_loss, weighted_term

TOKENS, HIDDEN, VOCABULARY, DIVISOR = 23, 8, 37, 40


def make_labels(tokens: int = TOKENS, seed: int = 0) -> Tensor:
    labels = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    labels[0, 3::5] = IGNORE_INDEX
    return labels


def make_inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, tokens, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias


def make_batch(labels: Tensor) -> dict[str, Any]:
    return {"shift_labels": labels, "loss_divisor": DIVISOR}


def reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Losses of the tokens [1, T] by PyTorch, 0 where there is no target."""
    return F.cross_entropy(F.linear(hidden[0], weight, bias), labels[0], reduction="none")[None]


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("chunk", [1, 5, 7, 23, 100, None], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
def test_loss_and_gradients_equal_plain_cross_entropy(chunk: int | None, with_bias: bool) -> None:
    labels = make_labels()
    ours, plain = make_inputs(), make_inputs()
    out = causal_lm_loss(*ours[:2], make_batch(labels), bias=ours[2] if with_bias else None, chunk_tokens=chunk)
    losses = reference(*plain[:2], plain[2] if with_bias else None, labels)

    torch.testing.assert_close(out.per_token_loss, losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss, losses.sum() / DIVISOR)
    torch.testing.assert_close(out.mean, losses.sum().detach() / int((labels != IGNORE_INDEX).sum()))
    (3 * out.loss).backward()
    (3 * losses.sum() / DIVISOR).backward()
    for index, (got, expected) in enumerate(zip(ours, plain, strict=True)):
        if index == 2 and not with_bias:
            assert got.grad is None
        else:
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk", [5, 23])
def test_logits_form_equals_plain_cross_entropy(chunk: int) -> None:
    labels = make_labels()
    logits = torch.randn(1, TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2)).requires_grad_()
    before = logits.detach().clone()
    out = causal_lm_loss(None, None, make_batch(labels), logits=logits, chunk_tokens=chunk)
    out.loss.backward()
    got, logits.grad = logits.grad, None
    losses = F.cross_entropy(logits[0], labels[0], reduction="none")
    (losses.sum() / DIVISOR).backward()

    assert torch.equal(logits, before)  # the chunks work in place, on copies
    torch.testing.assert_close(out.per_token_loss[0], losses.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, logits.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["hidden", "logits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_is_no_worse_than_plain(dtype: torch.dtype, form: str) -> None:
    # Many tokens and small chunks, so that a sum over chunks in the low precision would show.
    tokens = 512
    labels = make_labels(tokens)
    ours, plain = make_inputs(dtype, tokens), make_inputs(dtype, tokens)
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    if form == "hidden":
        out = causal_lm_loss(ours[0], ours[1], make_batch(labels), bias=ours[2], chunk_tokens=16)
    else:
        out = causal_lm_loss(None, None, make_batch(labels), logits=F.linear(*ours), chunk_tokens=16)
    out.loss.backward()
    # What a user would write: logits in the low precision, cross entropy in float32.
    plain_losses = F.cross_entropy(F.linear(*plain)[0].float(), labels[0], reduction="none")
    (plain_losses.sum() / DIVISOR).backward()
    exact_losses = reference(*exact, labels)
    (exact_losses.sum() / DIVISOR).backward()

    assert out.per_token_loss.dtype == torch.float32
    assert relative_error(out.per_token_loss, exact_losses) <= 1.01 * relative_error(plain_losses, exact_losses)
    for got, other, truth in zip(ours, plain, exact, strict=True):
        assert got.grad.dtype == dtype
        # One rounding of slack: both round the final gradient to the low precision.
        slack = torch.finfo(dtype).eps / 2
        assert relative_error(got.grad, truth.grad) <= relative_error(other.grad, truth.grad) + slack


def test_weight_gradient_accumulates_in_float32_over_chunks() -> None:
    # 2,048 chunks that each add the same amount: a bfloat16 running sum stops growing at 256 of them.
    tokens = 2048
    hidden = torch.ones(1, tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    out = causal_lm_loss(hidden, weight, {"shift_labels": labels, "loss_divisor": 1}, chunk_tokens=1)
    out.loss.backward()
    assert weight.grad.flatten().tolist() == [-0.5 * tokens, 0.5 * tokens]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_scale_of_a_loss_is_not_rounded_to_the_low_precision(dtype: torch.dtype) -> None:
    """A third in bfloat16 is too large by 0.2 %, and with it every gradient of a step of three micro-batches."""
    batch = make_batch(make_labels()) | {"loss_divisor": 1}
    whole, third = make_inputs(dtype), make_inputs(dtype)
    causal_lm_loss(*whole[:2], batch, bias=whole[2]).loss.backward()
    (causal_lm_loss(*third[:2], batch, bias=third[2]).loss / 3).backward()
    for one, part in zip(whole, third, strict=True):
        assert torch.equal(part.grad, (one.grad.float() / 3).to(dtype))


@pytest.mark.parametrize("form", ["hidden", "logits"])
@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_a_label_that_is_no_token_is_an_error(label: int, form: str) -> None:
    """As in PyTorch's own: it must not train on another token in silence."""
    hidden, weight, _ = make_inputs()
    labels = make_labels()
    labels[0, 4] = label
    given = (hidden, weight, None) if form == "hidden" else (None, None, F.linear(hidden, weight))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        causal_lm_loss(*given[:2], make_batch(labels), logits=given[2])


def test_float64_gradients_are_exact() -> None:
    # Not `gradcheck`: the losses come out in float32, so finite differences would measure that and not the gradient.
    labels = make_labels()
    # A divisor that is a power of two, since the float32 loss passes 1 / divisor on.
    ours, plain = make_inputs(torch.float64), make_inputs(torch.float64)
    batch = {"shift_labels": labels, "loss_divisor": 64}
    causal_lm_loss(*ours[:2], batch, bias=ours[2], chunk_tokens=5).loss.backward()
    (reference(*plain, labels).sum() / 64).backward()
    for got, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_tied_weight_gets_both_gradients() -> None:
    labels, tokens = make_labels(), make_labels(seed=3).clamp(min=0)
    embeddings = [make_inputs()[1] for _ in range(2)]
    causal_lm_loss(embeddings[0][tokens], embeddings[0], make_batch(labels), chunk_tokens=4).loss.backward()
    (reference(embeddings[1][tokens], embeddings[1], None, labels).sum() / DIVISOR).backward()
    torch.testing.assert_close(embeddings[0].grad, embeddings[1].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["hidden", "logits"])
def test_all_labels_ignored_give_zero_and_zero_gradients(form: str) -> None:
    hidden, weight, bias = make_inputs()
    batch = make_batch(torch.full((1, TOKENS), IGNORE_INDEX))
    if form == "hidden":
        out = causal_lm_loss(hidden, weight, batch, bias=bias, chunk_tokens=5)
    else:
        out = causal_lm_loss(None, None, batch, logits=F.linear(hidden, weight, bias), chunk_tokens=5)
    assert out.loss.item() == 0.0
    assert out.mean.item() == 0.0
    assert not out.per_token_loss.any()
    out.loss.backward()
    for tensor in (hidden, weight, bias):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_one_token() -> None:
    hidden, weight, _ = make_inputs(tokens=1)
    out = causal_lm_loss(hidden, weight, make_batch(torch.tensor([[5]])))
    torch.testing.assert_close(out.mean, reference(hidden, weight, None, torch.tensor([[5]])).detach().squeeze())


def test_only_loss_has_a_graph() -> None:
    hidden, weight, _ = make_inputs()
    labels = make_labels()
    out = causal_lm_loss(hidden, weight, make_batch(labels))
    assert out.loss.requires_grad
    assert not out.mean.requires_grad
    assert not out.per_token_loss.requires_grad
    assert out.per_token_loss.shape == labels.shape
    assert torch.equal(out.per_token_loss == 0, labels == IGNORE_INDEX)


def test_a_second_backward_is_an_error_and_never_a_wrong_gradient() -> None:
    hidden, weight, _ = make_inputs()
    loss = causal_lm_loss(hidden, weight, make_batch(make_labels()), chunk_tokens=5).loss
    torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="hands over its gradients once"):
        torch.autograd.grad(2 * loss, (hidden, weight))


def test_without_gradients_none_are_made() -> None:
    hidden, weight, _ = make_inputs()
    with torch.no_grad(), _Largest() as record:
        out = causal_lm_loss(hidden, weight, make_batch(make_labels()), chunk_tokens=5)
    assert not out.loss.requires_grad
    assert torch.ops.aten.scatter_add_.default not in record.operations
    assert torch.ops.aten.exp_.default in record.operations  # the recorder sees inside of the loss


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden, weight, _ = make_inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    causal_lm_loss(hidden, weight, make_batch(make_labels())).loss.backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_autocast_uses_its_dtype_and_keeps_float32_gradients() -> None:
    labels = make_labels()
    ours, plain = make_inputs(), make_inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_lm_loss(*ours[:2], make_batch(labels))
    out.loss.backward()
    causal_lm_loss(*plain[:2], make_batch(labels)).loss.backward()
    assert ours[1].grad.dtype == torch.float32
    torch.testing.assert_close(ours[1].grad, plain[1].grad.float())


def test_large_logits_do_not_overflow() -> None:
    labels = torch.tensor([[0, 1]])
    logits = torch.tensor([[[1e4, 0.0], [1e4, 0.0]]], requires_grad=True)
    out = causal_lm_loss(None, None, make_batch(labels), logits=logits)
    assert out.per_token_loss.tolist() == [[0.0, 1e4]]
    out.loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.0, 0.0], [1.0, -1.0]]]) / DIVISOR)


class _Largest(TorchDispatchMode):
    """Records the operations and the largest tensor that any of them returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.add(func)
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_logits_of_the_row_are_never_made() -> None:
    tokens, vocabulary, chunk = 4096, 512, 64
    hidden = torch.randn(1, tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens))
    with _Largest() as chunked:
        causal_lm_loss(hidden, weight, make_batch(labels), chunk_tokens=chunk).loss.backward()
    with _Largest() as plain:
        reference(hidden, weight, None, labels).sum().backward()
    assert chunked.elements == chunk * vocabulary
    assert plain.elements == tokens * vocabulary  # the recorder sees what it should


def test_default_chunk_bounds_the_logits() -> None:
    vocabulary, tokens = 2**16, 600
    hidden, weight = torch.randn(1, tokens, 1, requires_grad=True), torch.randn(vocabulary, 1)
    with _Largest() as record:
        causal_lm_loss(hidden, weight, make_batch(torch.zeros(1, tokens, dtype=torch.int64)))
    assert record.elements == 2**24


def peak_extra_bytes(dtype: torch.dtype, tokens: int, vocabulary: int, chunk: int) -> int:
    """What the loss allocates at its worst moment, by the allocator's events, less the gradients that it returns."""
    hidden = torch.randn(1, tokens, 4, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, 4, dtype=dtype).requires_grad_()
    batch = make_batch(torch.zeros(1, tokens, dtype=torch.int64))
    causal_lm_loss(hidden, weight, batch, chunk_tokens=chunk).loss.backward()  # caches of kernels
    hidden.grad = weight.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        causal_lm_loss(hidden, weight, batch, chunk_tokens=chunk).loss.backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held) - hidden.nbytes - weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_at_most_two_chunks(dtype: torch.dtype) -> None:
    tokens, vocabulary, chunk = 512, 4096, 64
    peak = peak_extra_bytes(dtype, tokens, vocabulary, chunk)
    chunk_bytes = chunk * vocabulary * 4
    assert chunk_bytes < peak <= 2.05 * chunk_bytes  # and a few numbers for each token
    assert peak < tokens * vocabulary * 4 / 3  # far from the logits of the row


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        pytest.param(2**26, "67108864 x 37 = 2483027968", id="beyond_int32"),
        pytest.param(0, "0 x 37 = 0", id="zero"),
    ],
)
def test_impossible_chunks_are_refused(chunk: int, message: str) -> None:
    hidden, weight, _ = make_inputs()
    with pytest.raises(ConfigurationError, match="chunk_tokens") as caught:
        causal_lm_loss(hidden, weight, make_batch(make_labels()), chunk_tokens=chunk)
    assert message in str(caught.value)
    assert f"at most {(2**31 - 1) // VOCABULARY}." in str(caught.value)


def test_neither_or_both_forms_are_refused() -> None:
    hidden, weight, _ = make_inputs()
    batch = make_batch(make_labels())
    for arguments in [
        {"hidden_states": hidden, "lm_head_weight": None},
        {"hidden_states": None, "lm_head_weight": None},
        {"hidden_states": hidden, "lm_head_weight": weight, "logits": F.linear(hidden, weight)},
    ]:
        with pytest.raises(ConfigurationError, match="one of two forms"):
            causal_lm_loss(**arguments, batch=batch)


def test_labels_of_another_shard_are_refused() -> None:
    hidden, weight, _ = make_inputs()
    with pytest.raises(BatchContractError, match=r"shift_labels.*\[1, 23\].*\[1, 46\]"):
        causal_lm_loss(hidden, weight, make_batch(make_labels(2 * TOKENS)))


def test_sharded_weight_is_refused() -> None:
    hidden, weight, _ = make_inputs()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ConfigurationError, match="lm_head_weight.*whole.*forward_methods"):
            causal_lm_loss(hidden, sharded, make_batch(make_labels()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("targets", [[1, 8, 3], [0, 20, 4]], ids=["uneven", "one_empty"])
def test_weighted_terms_come_out_as_their_token_weighted_mean(targets: list[int]) -> None:
    strengths = [0.5, 2.0, 7.0]
    values = [torch.tensor(strength, requires_grad=True) for strength in strengths]
    total = torch.zeros(())
    for value, count in zip(values, targets, strict=True):
        labels = torch.full((1, 24), IGNORE_INDEX)
        labels[0, :count] = 1
        total = total + weighted_term(value * value, make_batch(labels))
    total.backward()
    factor = DIVISOR / sum(targets)  # what the exact token mean multiplies the gradients of a step by
    expected = sum(strength**2 * count for strength, count in zip(strengths, targets, strict=True)) / sum(targets)
    assert math.isclose(total.item() * factor, expected, rel_tol=1e-6)
    for value, strength, count in zip(values, strengths, targets, strict=True):
        assert math.isclose(value.grad.item() * factor, 2 * strength * count / sum(targets), rel_tol=1e-6)
