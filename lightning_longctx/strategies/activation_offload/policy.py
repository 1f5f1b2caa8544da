"""Selective checkpointing that really offloads: kept outputs of operators wait on the host, the rest is computed again.

PyTorch's own ``MUST_CPU_OFFLOAD`` acts under its compiler only; in eager mode it recomputes, silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext

from lightning_longctx.strategies.activation_offload.identity import is_movable
from lightning_longctx.strategies.activation_offload.offloader import Offloader
from lightning_longctx.strategies.activation_offload.stash import Kept, Saved

__all__ = ["checkpoint_contexts"]

_Policy = Callable[..., CheckpointPolicy | bool]
_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def checkpoint_contexts(policy: _Policy, offloader: Offloader) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Contexts for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)``.

    Args:
        policy: as for PyTorch's ``create_selective_checkpoint_contexts``: called with a context, an operator and its
            arguments, in the first forward only. ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` move the outputs to
            the host, ``*_SAVE`` (or True) keeps them on the device, all else is computed again.
        offloader: moves them.

    Returns:
        The context of the first forward, and that of its repetitions.
    """
    kept: dict[tuple[Any, int], Any] = {}
    return _Keeping(kept, policy, offloader), _Answering(kept, offloader)


class _Counting(TorchDispatchMode):
    """Tells apart the calls of one operator: the first and the second forward make the same ones in the same order."""

    def __init__(self, kept: dict[tuple[Any, int], Any], offloader: Offloader) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.offloader = kept, offloader
        self.calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self.calls.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def call(self, operator: Any) -> tuple[Any, int]:
        self.calls[operator] += 1
        return operator, self.calls[operator]


class _Keeping(_Counting):
    def __init__(self, kept: dict[tuple[Any, int], Any], policy: _Policy, offloader: Offloader) -> None:
        super().__init__(kept, offloader)
        self.policy = policy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in SAC_IGNORED_OPS:
            return output
        place = self.call(func)
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # an argument only from torch 2.13 on
        choice = self.policy(context, func, *args, **(kwargs or {}))
        if choice is True or choice in _KEEP:
            self.kept[place] = tree_map_only(Tensor, lambda tensor: self._hold(tensor, False), output)
        elif choice in _OFFLOAD:
            self.kept[place] = tree_map_only(Tensor, lambda tensor: self._hold(tensor, True), output)
        return output

    def _hold(self, tensor: Tensor, moves: bool) -> Saved | Kept:
        # Below autograd a detached tensor would have a version counter of its own, and changes in place go unseen.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            movable = moves and is_movable(tensor) and tensor.device == self.offloader.backend.device
            return self.offloader.save(tensor) if movable else Kept(tensor)


class _Answering(_Counting):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SAC_IGNORED_OPS:
            entry = self.kept.get(self.call(func))
            if entry is not None:
                return tree_map_only((Saved, Kept), self.offloader.unpack, entry)
        return func(*args, **(kwargs or {}))
