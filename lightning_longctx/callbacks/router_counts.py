"""Counting routing decisions on the device: once for each token, without waiting for the device.

Hooks see a decision again when activation checkpointing runs a forward a second time in backward, so what runs inside
backward is not counted. The counting itself happens outside the dispatch modes of selective checkpointing: operations
that only the first pass runs would shift the numbers by which that matches its saved results, and gradients would be
silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lightning_longctx.callbacks.router_decisions import DROPPED, Extract, read_decisions, read_output
from lightning_longctx.callbacks.router_sites import RouterSite

__all__ = ["EXTRA_COLUMNS", "RouterCounts", "record_router_indices"]

#: Columns behind those of the experts: choices of padding, choices beyond a capacity, choices out of range, the largest
#: value out of range, forwards seen, and tokens for which the batch's padding could not be told.
EXTRA_COLUMNS = 6
_PADDING, _DROPPED, _OUTSIDE, _WORST, _CALLS, _UNMASKED = range(EXTRA_COLUMNS)

#: Where decisions may show, best first.
_SOURCES = ("recorded", "router", "experts")
_RECORDED, _ROUTER, _EXPERTS = range(3)

_MARK = "_longctx_router_recorder"


def record_router_indices(module: nn.Module, indices: Tensor) -> None:
    """Tell :class:`~lightning_longctx.MoERouterHeatmap` what was routed where no module returns it.

    Call it in the forward of the module that holds the experts. Without the callback it does nothing.

    Args:
        module: the module that holds router and experts, or one that ``MoERouterHeatmap(routers=...)`` names.
        indices: integer ``[..., k]``, local: the experts of each token; -1 where a capacity was exceeded.

    Example:
        >>> record_router_indices(nn.Linear(4, 2), torch.tensor([[0], [1]]))
    """
    record: Callable[[Tensor], None] | None = module.__dict__.get(_MARK)
    if record is not None:
        record(indices)


class RouterCounts:
    """One matrix of counts for each place where decisions may show, and the hooks that fill it.

    Args:
        sites: the layers of experts.
        device: of the model.
        extract: reads the output of a router; None for the built-in rules.

    Attributes:
        active: whether forwards count now.
        valid: bool ``[N]``, which tokens of the present micro-batch are not padding; None if all count.
    """

    def __init__(self, sites: Sequence[RouterSite], device: torch.device, extract: Extract | None = None) -> None:
        self.sites = list(sites)
        self.active = False
        self.valid: Tensor | None = None
        self._extract = extract
        self._width = max(site.num_experts for site in self.sites) + EXTRA_COLUMNS
        shape = (len(_SOURCES), len(self.sites), self._width)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._restored = torch.zeros(shape[1:], dtype=torch.int64, device=device)
        self._source: list[int] | None = None  # of each site, once the first batch has told
        self._handles: list[list[RemovableHandle]] = [[] for _ in _SOURCES]
        for number, site in enumerate(self.sites):
            self._attach(number, site)

    def detach(self) -> None:
        """Remove every hook and mark."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()
            handles.clear()
        for site in self.sites:
            site.module.__dict__.pop(_MARK, None)

    def settle(self) -> list[str]:
        """Choose, once, for each site the best place that spoke. Reads from the device.

        Returns:
            Paths of sites that ran without any decision to be seen.
        """
        if self._source is not None:
            return []
        seen = (self._counts[..., : self._width - EXTRA_COLUMNS + _OUTSIDE + 1].sum(-1) > 0).tolist()
        calls = (self._counts[..., self._column(_CALLS)].sum(0) > 0).tolist()
        if not any(calls):
            return []
        sources, silent = [], []
        for number, site in enumerate(self.sites):
            spoke = [source for source in range(len(_SOURCES)) if seen[source][number]]
            sources.append(spoke[0] if spoke else _ROUTER)
            if not spoke and calls[number]:
                silent.append(site.path)
        self._source = sources
        return silent

    def take(self) -> Tensor:
        """The counts of the window, int64 ``[sites, experts + EXTRA_COLUMNS]`` on the device, and start a new one."""
        counts = self.peek()
        self._counts.zero_()
        self._restored.zero_()
        return counts

    def peek(self) -> Tensor:
        """The counts of the window so far; see :meth:`take`."""
        sources = self._source or [_ROUTER] * len(self.sites)
        return self._restored + torch.stack([self._counts[source, number] for number, source in enumerate(sources)])

    def restore(self, counts: Tensor) -> None:
        """Go on with the counts of a saved window."""
        self._restored.copy_(counts)

    def _column(self, extra: int) -> int:
        return self._width - EXTRA_COLUMNS + extra

    def _attach(self, number: int, site: RouterSite) -> None:
        def after_router(module: nn.Module, args: Any, output: Any) -> None:
            self._observe(_ROUTER, number, lambda: self._read(module, output, site.num_experts))

        def before_experts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._observe(_EXPERTS, number, lambda: read_decisions((args, kwargs), site.num_experts))

        def record(indices: Tensor) -> None:
            self._observe(_RECORDED, number, lambda: indices.reshape(-1, indices.shape[-1]))

        self._handles[_ROUTER] += [router.register_forward_hook(after_router) for router in site.routers]
        if site.experts is not None:
            handle = site.experts.register_forward_pre_hook(before_experts, with_kwargs=True)
            self._handles[_EXPERTS].append(handle)
        site.module.__dict__[_MARK] = record

    def _read(self, module: nn.Module, output: Any, num_experts: int) -> Tensor | None:
        if self._extract is None:
            return read_output(module, output, num_experts)
        indices = self._extract(module, output)
        return None if indices is None else indices.reshape(-1, indices.shape[-1])

    def _observe(self, source: int, number: int, read: Callable[[], Tensor | None]) -> None:
        if not self.active:
            return
        if torch.compiler.is_compiling():
            # The compiler traces what follows into its graph, and decides itself what backward computes again.
            self._count(source, number, read)
        elif (
            torch._C._current_graph_task_id() == -1
        ):  # a forward inside backward is a recompute, in every checkpointing
            with torch.no_grad(), _disable_current_modes():
                self._count(source, number, read)

    def _count(self, source: int, number: int, read: Callable[[], Tensor | None]) -> None:
        counts = self._counts[source, number]
        counts[self._column(_CALLS)] += 1
        indices = read()
        if indices is not None:
            self._add(counts, indices, self.sites[number].num_experts)

    def _add(self, counts: Tensor, indices: Tensor, num_experts: int) -> None:
        """Add decisions ``[N, k]`` to one row of counts."""
        indices = indices.long()
        outside = (indices >= num_experts) | (indices < DROPPED)
        columns = torch.where(outside, self._column(_OUTSIDE), indices)
        columns = torch.where(indices == DROPPED, self._column(_DROPPED), columns)
        valid = self.valid
        if valid is not None and valid.numel() == indices.shape[0]:
            columns = torch.where(valid[:, None], columns, self._column(_PADDING))
        elif valid is not None:
            counts[self._column(_UNMASKED)] += indices.shape[0]
        flat = columns.reshape(-1)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        worst = self._column(_WORST)
        counts[worst] = torch.maximum(counts[worst], torch.where(outside, indices, 0).amax())
