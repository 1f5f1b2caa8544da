"""Activation checkpointing: drop what a block computed and compute it again in backward.

Only a block's ``forward`` is repeated, not its call: hooks on the block run once, FSDP2's among them. What a forward
needs to know of its batch travels as an argument, so the repetition exchanges heads for sequence just as the first time
and sees the same document bounds; random numbers are restored for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.positional import with_positional_tensors
from lightning_longctx.strategies.settings import as_settings

__all__ = [
    "ActivationCheckpointing",
    "CheckpointingMode",
    "apply_checkpointing",
    "as_checkpointing",
    "checkpoints_itself",
]

CheckpointingMode = Literal["none", "full", "every_n", "selective"]

# The kernels whose work grows with the square of a document's length. ``selective`` keeps their outputs, by these names
# of operators; everything else grows linearly and is computed again.
_ATTENTION_OPERATORS = frozenset(
    {
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "torch_attn._varlen_attn",
        "flash_attn._flash_attn_varlen_forward",
        "flash_attn_3._flash_attn_forward",
        "flex_attention",
    }
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks are computed again in backward.

    Args:
        mode: ``full`` (default): every block, one block's activations live at a time. ``every_n``: every n-th block,
            for runs with memory to spare. ``selective``: every block, but the outputs of attention kernels are kept:
            their work is quadratic in the length, and they are small (hidden size x tokens of the rank for each
            block). ``none``: nothing.
        n: of ``every_n``: the first block of each n is computed again. Default 2, half of them.
        reentrant: must be false: the older implementation of PyTorch takes no keyword arguments and runs a backward
            inside a backward, which FSDP2 does not expect.

    Raises:
        ConfigurationError: an unknown mode, ``n`` below 1, or ``reentrant``.
    """

    mode: CheckpointingMode = "full"
    n: int = 2
    reentrant: bool = False

    def __post_init__(self) -> None:
        choices, field = get_args(CheckpointingMode), "strategy.activation_checkpointing"
        if self.mode not in choices:
            raise ConfigurationError(
                f"{field}.mode", f"must be one of {list(choices)}", repr(self.mode), "`full` needs least memory."
            )
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ConfigurationError(
                f"{field}.n", "must be a positive int", repr(self.n), "2 means half of the blocks."
            )
        if self.reentrant:
            fix = "Leave it out: the non-reentrant implementation gives the same numbers."
            raise ConfigurationError(f"{field}.reentrant", "must be false with FSDP2", True, fix)


def as_checkpointing(value: CheckpointingMode | ActivationCheckpointing | Mapping[str, Any]) -> ActivationCheckpointing:
    """Turn a mode, a mapping or settings into settings.

    Raises:
        ConfigurationError: an unknown mode or key.
    """
    if isinstance(value, str):
        return ActivationCheckpointing(mode=value)
    return as_settings(ActivationCheckpointing, value, "activation_checkpointing")


def checkpoints_itself(module: nn.Module) -> list[str]:
    """Names of the submodules that checkpoint by themselves: Hugging Face's switch, or PyTorch's wrapper."""
    return [
        name
        for name, child in module.named_modules()
        if getattr(child, "gradient_checkpointing", False) is True or type(child).__name__ == "CheckpointWrapper"
    ]


def apply_checkpointing(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    settings: ActivationCheckpointing,
    offloading: Callable[[Callable[..., Any]], Callable[[], Any]] | None = None,
) -> None:
    """Let blocks compute their activations again, in place, before they are sharded.

    Args:
        module: the whole module.
        blocks: its repeated blocks.
        settings: which of them.
        offloading: makes the contexts of ``selective`` from a policy that moves what it keeps to the host; None keeps
            it on the device.

    Raises:
        ConfigurationError: the model checkpoints by itself already, has no repeated blocks, or compiles their calls.
    """
    if settings.mode == "none":
        return
    field = "strategy.activation_checkpointing"
    own = checkpoints_itself(module)
    if own:
        fix = "Keep one: leave the strategy's out, or call the model's `gradient_checkpointing_disable()`."
        got = f"a model that checkpoints by itself in {own[0]} and {len(own) - 1} more"
        raise ConfigurationError(field, "must be none where the model recomputes already", got, fix)
    if not blocks:
        fix = "Name the blocks in `sharding.blocks`, or write `activation_checkpointing: none`."
        raise ConfigurationError(field, "needs repeated blocks", f"{type(module).__name__} without any", fix)
    _check_compiled(module, blocks, field)
    step = settings.n if settings.mode == "every_n" else 1
    contexts = None
    if settings.mode == "selective" and offloading is not None:
        contexts = offloading(partial(_keep_attention, CheckpointPolicy.MUST_CPU_OFFLOAD))
    elif settings.mode == "selective":
        policy = partial(_keep_attention, CheckpointPolicy.MUST_SAVE)
        contexts = partial(create_selective_checkpoint_contexts, policy)
    for block in blocks[::step]:
        block.forward = partial(_checkpointed, block.forward, contexts)


def _check_compiled(module: nn.Module, blocks: Sequence[nn.Module], field: str) -> None:
    """Refuse compiled calls: the repetition would lie inside them, where the compiler gives up and compiles nothing."""
    compiled = [child for child in module.modules() if type(child).__name__ == "OptimizedModule"]
    inside = {child for outer in compiled for child in outer.children()}
    for block in blocks:
        if block._compiled_call_impl is not None or block in inside:
            fix = "Compile what is repeated, `block.forward = torch.compile(block.forward)`, and not the block's call."
            got = f"a compiled call of {type(block).__name__}"
            raise ConfigurationError(field, "must be none where the call of a block is compiled", got, fix)


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    call, tensors = with_positional_tensors(forward, args, kwargs)
    if contexts is None:
        return checkpoint(call, *tensors, use_reentrant=False)
    return checkpoint(call, *tensors, use_reentrant=False, context_fn=contexts)


def _keep_attention(
    choice: CheckpointPolicy, context: Any, operator: Any, /, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = str(operator)
    known = name in _ATTENTION_OPERATORS or name.rpartition(".")[0] in _ATTENTION_OPERATORS
    return choice if known else CheckpointPolicy.PREFER_RECOMPUTE
