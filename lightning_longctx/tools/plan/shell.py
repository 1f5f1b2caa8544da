"""A module without memory: weights by their shapes alone, some of its blocks, and a batch to run it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.initialization import get_tensor, meta_names, set_tensor

__all__ = ["block_list", "group_experts", "imagined_batch", "known_bounds", "loss_of", "materialize", "optimizers_of"]


def block_list(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.ModuleList | None:
    """The list that holds exactly these blocks, if they are all alike: it can be cut without changing their kind."""
    shapes = [[(name, value.shape) for name, value in block.named_parameters()] for block in blocks]
    if not blocks or any(shape != shapes[0] for shape in shapes):
        return None
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and list(child) == list(blocks):
            return child
    return None


def group_experts(module: nn.Module) -> bool:
    """Let experts that run one after another (Hugging Face's ``eager``) run as grouped products, in place.

    Which tokens each of them gets is known in a run only; together they hold the same.

    Returns:
        Whether there were any.
    """
    found = False
    for child in module.modules():
        one_by_one = getattr(getattr(child, "config", None), "_experts_implementation", None) == "eager"
        able: Any = getattr(child, "_can_set_experts_implementation", None)
        if one_by_one and able is not None and able():
            child.set_experts_implementation("grouped_mm")  # type: ignore[operator]  # a Hugging Face model
            found = True
    return found


def materialize(module: nn.Module, name: str, unit: nn.Module) -> None:
    """Replace the meta tensors of a unit by fake ones on the device; ties are kept.

    Args:
        module: the whole module.
        name: of the unit.
        unit: part of it.
    """
    tied: dict[int, list[str]] = {}
    for other, parameter in module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(other)
    for entry in meta_names(unit, name):
        old = get_tensor(module, entry)
        new: Tensor = torch.empty(old.shape, dtype=old.dtype, device="cpu")
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for other in tied.get(id(old), [entry]):
            set_tensor(module, other, new)


def imagined_batch(tokens: int, sp_size: int) -> dict[str, Any]:
    """A packed batch of rank 0: one document as long as the row.

    Args:
        tokens: of the row.
        sp_size: ranks that share it.
    """
    bounds = torch.empty(2, dtype=torch.int32)  # [0, tokens]: see `known_bounds`
    ids = torch.empty(1, tokens // sp_size, dtype=torch.int64)
    return {
        **{key: torch.empty_like(ids) for key in ("input_ids", "shift_labels", "position_ids", "source_ids")},
        "cu_seqlens": bounds,
        "max_seqlen": tokens,
        "document_keys": torch.zeros(1, 2, dtype=torch.int64),
        "loss_divisor": tokens,
    }


@contextmanager
def known_bounds(tokens: int) -> Iterator[None]:
    """Let attention read the document bounds of :func:`imagined_batch`: int32 ``[2]``, the one tensor with values."""
    unknown = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        return [0, tokens] if tensor.dtype == torch.int32 and tensor.shape == (2,) else unknown(tensor)

    with patch.object(FakeTensor, "tolist", tolist):
        yield


def loss_of(output: object) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        ConfigurationError: none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(found, Tensor) or not found.requires_grad:
        fix = "Automatic optimization is simulated: return the loss, or a dict with `loss`."
        raise ConfigurationError("training_step", "must return a loss with a gradient", type(found).__name__, fix)
    return found


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """The optimizers of ``configure_optimizers``, in whatever form Lightning takes them.

    Raises:
        ConfigurationError: none that PyTorch knows.
    """
    found = list(_optimizers(module.configure_optimizers()))
    if not found:
        fix = "Write `configure_optimizers`, or plan with CausalLMModule."
        raise ConfigurationError("model", "must configure an optimizer", type(module).__name__, fix)
    return found


def _optimizers(value: Any) -> Iterable[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from _optimizers(value.get("optimizer"))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _optimizers(entry)
