"""Whether a forward is the first one or its repetition in backward.

Activation checkpointing runs a block's forward again during backward, and hooks inside the block run again with it. Who
counts in a hook (tokens of an expert, calls of a layer) asks here, whoever checkpoints: this suite's strategy, Hugging
Face's own switch or a user's ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import torch

__all__ = ["is_recomputing"]


def is_recomputing() -> bool:
    """Whether this code runs inside a backward pass of this thread; in a forward hook that means recompute.

    Example:
        >>> is_recomputing()
        False
        >>> seen = []
        >>> x = torch.ones(1, requires_grad=True)
        >>> def forward(t):
        ...     seen.append(is_recomputing())
        ...     return t.sin()
        >>> torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).backward()
        >>> seen
        [False, True]
    """
    return bool(torch._C._current_graph_task_id() != -1)
