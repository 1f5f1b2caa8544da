"""How many bytes move: what arithmetic says, and not one more."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_longctx import ConfigurationError
from lightning_longctx.strategies.activation_checkpointing import ActivationCheckpointing, apply_checkpointing
from lightning_longctx.strategies.shard import find_blocks
from tests.parity.models import CONFIGS
from tests.strategies.activation_offload.helpers import (
    INPUT_BYTES,
    TOKENS,
    WIDTH,
    Block,
    Model,
    batch,
    expected,
    gradients,
    running,
    same,
)

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def llama(layers=4, own=None, dtype=torch.float32):
    config = dict(CONFIGS["llama"]) | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    if own is not None:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # by release of transformers
        enable = getattr(model, next(name for name in names if hasattr(model, name)))
        enable({"use_reentrant": own == "reentrant"})
        model.train()
    return model


def step(model, tokens=32):
    model(input_ids=torch.arange(tokens)[None], use_cache=False).logits.float().square().mean().backward()


@MODES
@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_inputs_of_a_checkpointed_model(mode, keep, dtype):
    layers, tokens = 5, 32
    model, offload = llama(layers, dtype=dtype), running(mode, keep_last_blocks=keep)
    blocks = find_blocks(model)
    apply_checkpointing(model, blocks, ActivationCheckpointing("full"))
    offload.attach(model, blocks)
    step(model, tokens)
    size = dtype.itemsize
    hidden = (layers - keep) * tokens * 64 * size
    positions = 2 * tokens * 8 * size + tokens * 8  # cos and sin, keyword arguments in a tuple, and position ids: once
    mask = tokens * tokens * size  # additive, of eager attention
    assert offload.counters.bytes_out - hidden - positions in {0, mask, tokens * tokens}
    assert offload.counters.duplicate_bytes > 0


@MODES
@pytest.mark.parametrize("own", ["reentrant", "non-reentrant"])
def test_checkpoints_that_the_model_makes_itself(mode, own):
    layers, tokens = 4, 32
    reference = llama(layers, own)
    step(reference, tokens)
    model, offload = llama(layers, own), running(mode)
    offload.attach(model, find_blocks(model))
    step(model, tokens)
    assert same(gradients(model), gradients(reference))
    assert offload.counters.bytes_out >= layers * tokens * 64 * 4
    assert offload.counters.bytes_out < layers * tokens * 64 * 4 + 4 * tokens * tokens * 4


class Keywords(Model):
    """Calls its checkpointed blocks with keyword arguments only."""

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x=x, scale=torch.full((1,), 0.5))
        return x


@MODES
@pytest.mark.parametrize("mode_of_checkpoint", ["full", "selective"])
def test_checkpoint_inputs_given_as_keywords_move(mode, mode_of_checkpoint):
    """Inputs given as keywords reach no hook by themselves."""
    wanted = expected(Keywords(), batch())
    model, offload = Keywords(), running(mode)
    apply_checkpointing(model, list(model.layers), ActivationCheckpointing(mode_of_checkpoint))
    offload.attach(model, model.layers)
    model(batch()).square().mean().backward()
    assert same(gradients(model), wanted)
    assert offload.counters.bytes_out == 4 * (INPUT_BYTES + 4)


@MODES
def test_recompute_is_not_offloaded_again(mode):
    """Megatron#7044: an outer offload and a checkpoint copy the same tensors twice."""
    model, offload = Model(how="non-reentrant"), running(mode, level="all")
    with offload.everywhere(model):
        x = batch().requires_grad_()
        for layer in model.layers:
            x = layer(x, torch.full((1,), 0.5))
        x.sum().backward()
    assert offload.counters.bytes_out == 4 * INPUT_BYTES + 4 * 4
    assert offload.counters.bytes_in <= offload.counters.bytes_out


def test_a_checkpoint_around_the_chosen_modules_is_named():
    """pytorch#84907: offload inside of somebody's checkpoint saves nothing."""
    model, offload = Model(), running("sync", level="all")
    offload.attach(model, model.layers)
    x = batch()
    for layer in model.layers:
        x = checkpoint(layer, x, torch.full((1,), 0.5), use_reentrant=False)
    x.sum().backward()
    assert offload.counters.bytes_out == 0
    with pytest.raises(ConfigurationError, match="run inside of a checkpoint made elsewhere"):
        offload.report()


class Products(torch.nn.Module):
    """Six products in a row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = torch.mm(x, weight).tanh()
        return x


class Below(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts products that are really computed: below the modes that answer from memory."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func == torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@MODES
def test_a_policy_really_offloads_in_eager_mode(mode):
    """pytorch#180874, 185015, 196956: MUST_CPU_OFFLOAD of PyTorch computes again in eager mode, silently."""

    def choose(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_CPU_OFFLOAD if operator == torch.ops.aten.mm.default else False

    def run(context_fn, model, x):
        with Below() as below:
            y = checkpoint(model, x, use_reentrant=False, context_fn=context_fn)
            forward = below.products
            y.square().sum().backward()
        return forward, below.products

    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    reference = Products()
    reference(x).square().sum().backward()
    model, offload = Products(), running(mode)
    forward, total = run(offload.checkpoint_contexts(choose), model, x)
    assert same(gradients(model), gradients(reference))
    assert forward == 6
    assert total == 6 + 6 + 5, "two products for each in backward but the first; none again"
    assert offload.counters.bytes_out == 6 * TOKENS * WIDTH * 4
    assert offload.host_bytes[0] == 0


@MODES
def test_a_policy_that_keeps_and_one_that_computes_again(mode):
    model, offload = Products(), running(mode)
    x = torch.randn(TOKENS, WIDTH)

    def choose(context, operator, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE
        )

    checkpoint(model, x, use_reentrant=False, context_fn=offload.checkpoint_contexts(choose)).sum().backward()
    reference = Products()
    reference(x).sum().backward()
    assert same(gradients(model), gradients(reference))
    assert offload.counters.bytes_out == 0


def test_changes_in_place_of_what_a_policy_keeps_raise():
    offload = running("sync")
    weight = torch.randn(4, 4, requires_grad=True)

    def forward(x):
        y = torch.mm(x, weight)
        z = y.sin()
        with torch.no_grad():
            y.add_(1)
        return z

    def choose(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_CPU_OFFLOAD if operator == torch.ops.aten.mm.default else False

    out = checkpoint(forward, torch.randn(4, 4), use_reentrant=False, context_fn=offload.checkpoint_contexts(choose))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@MODES
def test_the_newest_stay_within_the_device_limit(mode):
    wanted = expected(Model(), batch())
    limit = 2 * INPUT_BYTES / 2**30
    model, offload = Model(how="non-reentrant"), running(mode, device_limit_gib=limit)
    offload.attach(model, model.layers)
    loss = model(batch()).square().mean()
    assert offload.counters.bytes_out >= 2 * INPUT_BYTES
    assert offload.counters.bytes_out <= 2 * INPUT_BYTES + 4 * 4
    loss.backward()
    assert same(gradients(model), wanted)
    for _ in range(3):  # abandoned graphs leave the count where it was: VeOmni's leaks, and goes below zero
        del loss
        loss = model(batch()).square().mean()
    del loss
    assert offload._offloader._resident_bytes == 0


@MODES
def test_device_bytes_are_right_after_several_backwards(mode):
    model, offload = Model(), running(mode, level="all", device_limit_gib=1e-5)
    offload.attach(model, model.layers)
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    assert offload._offloader._resident_bytes == 0
    assert offload._offloader._ahead_bytes == 0


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@MODES
@pytest.mark.parametrize("compile_what", ["block", "forward"])
def test_compiled_blocks(mode, compile_what):
    """pytorch#113263, 116221, 148222: hooks that run while a graph is traced, or all at once."""
    torch._dynamo.reset()
    wanted = expected(Model(blocks=2), batch())
    model, offload = Model(blocks=2), running(mode, level="all")
    for place, layer in enumerate(model.layers):
        if compile_what == "block":
            model.layers[place] = torch.compile(layer, backend="aot_eager")
        else:
            layer.compile(backend="aot_eager")
    offload.attach(model, list(model.layers))
    packs = []
    for _ in range(3):
        model.zero_grad()
        model(batch()).square().mean().backward()
        packs.append(offload.counters.copies_out + sum(number for number, _ in offload.counters.stayed.values()))
    assert packs == [packs[0], 2 * packs[0], 3 * packs[0]], "none while a graph is traced"
    got = {name.replace("_orig_mod.", ""): value for name, value in gradients(model).items()}
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value)
    assert offload.counters.calls == 6
    assert offload.counters.bytes_out > 0
    assert offload.counters.stayed["weights"][0] > 0
    assert offload.host_bytes[0] == 0
    assert isinstance(model.layers[0], (Block, torch._dynamo.eval_frame.OptimizedModule))
