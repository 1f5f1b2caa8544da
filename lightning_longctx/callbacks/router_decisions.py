"""What a router decided, read from what its forward returned: the index of an expert for each token and choice.

The rule is the form of the output, an integer tensor with one row for each token and fewer columns than experts. The
few families that return something else have a reader of their own, by class name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["DROPPED", "Extract", "read_decisions", "read_output"]

#: The index of a choice that no expert took, because its capacity was exceeded.
DROPPED = -1

#: A reader of a user's own router: module and output to integer indices ``[..., k]``, or None.
Extract: TypeAlias = Callable[[nn.Module, Any], "Tensor | None"]


def read_output(router: nn.Module, output: Any, num_experts: int) -> Tensor | None:
    """Expert indices in the output of a router.

    Args:
        router: the module.
        output: what its forward returned.
        num_experts: number of experts.

    Returns:
        Integer ``[N, k]``, :data:`DROPPED` for choices beyond a capacity; None if the output tells nothing.
    """
    for kind in type(router).__mro__:  # a sharded module has a class of its own above its family's
        if kind.__name__ in _READERS:
            return _READERS[kind.__name__](router, output)
    return read_decisions(output, num_experts)


def read_decisions(values: Any, num_experts: int) -> Tensor | None:
    """The first integer tensor ``[..., k]`` with ``k`` at most ``num_experts``, as ``[N, k]``; None without one."""
    for tensor in _tensors(values):
        if tensor.dim() >= 2 and tensor.shape[-1] <= num_experts and _is_integer(tensor):
            return tensor.reshape(-1, tensor.shape[-1])
    return None


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _each(values.values())
    elif isinstance(values, tuple | list):
        yield from _each(values)


def _each(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from _tensors(value)


def _from_mask(mask: Tensor, choices: int) -> Tensor:
    """Indices ``[N, choices]`` of the ones in each row of ``[N, E]``; :data:`DROPPED` where a row has fewer."""
    flat = mask.reshape(-1, mask.shape[-1])
    taken, indices = (flat != 0).to(torch.uint8).topk(choices, dim=-1)
    return torch.where(taken != 0, indices, DROPPED)


def _llama4(router: nn.Module, output: Any) -> Tensor:
    scores = output[0]  # [N, E]: sigmoid of -inf, so exactly 0, for experts that were not chosen
    return _from_mask(scores > 0, int(getattr(router, "top_k", 1)))


def _switch(router: nn.Module, output: Any) -> Tensor:
    return _from_mask(output[0], 1)  # one-hot [B, S, E], zeros where the expert's capacity was exceeded


def _nllb(router: nn.Module, output: Any) -> Tensor:
    return _from_mask(output[1], 2)  # combined gates [N, E] of both choices, zeros where a capacity was exceeded


def _jetmoe(router: nn.Module, output: Any) -> Tensor:
    logits: Tensor = output[-1]  # [N, E]; the integers beside it are an order of sorting, not experts
    return logits.topk(int(getattr(router, "top_k", 1)), dim=-1).indices


_READERS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "JetMoeTopKGating": _jetmoe,
    "Llama4Router": _llama4,
    "NllbMoeTop2Router": _nllb,
    "SwitchTransformersTop1Router": _switch,
}
