"""Where offload begins: around the calls of the chosen modules, outside of whatever checkpoints them.

Only the innermost pair of saved-tensor hooks sees a tensor, and checkpointing has a pair of its own. So the hooks of
offload go around the checkpoint and see what it keeps: its inputs. Inside of it they would switch it off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_longctx.recompute import is_recomputing
from lightning_longctx.strategies.activation_offload.offloader import Offloader
from lightning_longctx.strategies.positional import with_positional_tensors

__all__ = ["attach"]

_Undo = Callable[[], None]


def attach(module: nn.Module, blocks: Sequence[nn.Module], offloader: Offloader) -> _Undo:
    """Let blocks offload what they save, in place; other instances of their classes do not.

    Args:
        module: the whole module.
        blocks: its chosen submodules. Compile them and wrap their ``forward`` for checkpointing before this.
        offloader: moves it.

    Returns:
        A function that takes the wrappers off again.
    """
    wrappers = _wrappers(module)
    undo: list[_Undo] = []
    for block in blocks:
        outer = block
        while outer in wrappers:
            outer = wrappers[outer]
        if getattr(block, "gradient_checkpointing", False) is True and hasattr(block, "_gradient_checkpointing_func"):
            # Hugging Face's layers call their checkpoint from `__call__`, around everything else.
            around = partial(_untraced(_offloaded_checkpoint), offloader, block, block._gradient_checkpointing_func)
            undo.append(_replace(block, "_gradient_checkpointing_func", around))
        elif hasattr(outer, "checkpoint_fn"):
            around = partial(_untraced(_offloaded_checkpoint), offloader, block, outer.checkpoint_fn)
            undo.append(_replace(outer, "checkpoint_fn", around))
        elif outer._compiled_call_impl is not None:
            around = partial(_untraced(_offloaded), offloader, block, outer._compiled_call_impl)
            undo.append(_replace(outer, "_compiled_call_impl", around))
        else:
            undo.append(_replace(outer, "forward", partial(_untraced(_offloaded), offloader, block, outer.forward)))

    def detach() -> None:
        for step in reversed(undo):
            step()

    return detach


def _offloaded(
    offloader: Offloader, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not _may_offload(offloader):
        return forward(*args, **kwargs)
    with offloader.block(block.modules(), (args, kwargs)):
        return forward(*args, **kwargs)


def _offloaded_checkpoint(
    offloader: Offloader, block: nn.Module, run: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any
) -> Any:
    if not _may_offload(offloader):
        return run(function, *args, **kwargs)
    if isinstance(function, partial):  # Hugging Face binds keyword arguments before it checkpoints
        inner, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    else:
        inner = function
    call, tensors = with_positional_tensors(inner, args, kwargs)
    with offloader.block(block.modules(), tensors):
        return run(call, *tensors)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a compiler away from a function; a compiled module that it calls is compiled all the same."""
    untraced: Callable[..., Any] = torch.compiler.disable(function)
    return untraced


def _may_offload(offloader: Offloader) -> bool:
    if not torch.is_grad_enabled() or is_recomputing():
        return False
    offloader.counters.calls += 1
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    hidden = hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook")
    offloader.counters.hidden_calls += hidden
    return not hidden


def _wrappers(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Modules that stand for another one: those of ``torch.compile`` and of PyTorch's checkpoint wrapper."""
    found: dict[nn.Module, nn.Module] = {}
    for outer in module.modules():
        inner = outer._modules.get("_orig_mod") or outer._modules.get("_checkpoint_wrapped_module")
        if inner is not None:
            found[inner] = outer
    return found


def _replace(owner: Any, name: str, value: Any) -> _Undo:
    own = owner.__dict__.get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo
