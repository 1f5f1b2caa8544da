"""Calls whose tensors are all positional: what a checkpoint keeps of a call, and saved-tensor hooks can see.

PyTorch's checkpoint saves positional tensors through hooks. Those in keyword arguments it holds past them, on the
device, where no activation offload can move them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["with_positional_tensors"]


def with_positional_tensors(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Turn a call into one whose tensors are all positional, since a checkpoint saves only those through hooks.

    Args:
        function: what a checkpoint repeats.
        args: its arguments.
        kwargs: its keyword arguments. Tensors in tuples, lists and dicts are found too.

    Returns:
        A function of tensors alone, and the tensors, each once.
    """
    leaves, form = tree_flatten((tuple(args), dict(kwargs)))
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    rest: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in places:
            places[id(leaf)] = len(tensors)
            tensors.append(leaf)
        rest.append(_Place(places[id(leaf)]) if isinstance(leaf, Tensor) else leaf)

    def call(*given: Tensor) -> Any:
        filled = [given[leaf.number] if isinstance(leaf, _Place) else leaf for leaf in rest]
        positional, named = tree_unflatten(filled, form)
        return function(*positional, **named)

    return call, tensors


class _Place:
    """Stands for a tensor in a list of arguments, and does not hold it."""

    def __init__(self, number: int) -> None:
        self.number = number
