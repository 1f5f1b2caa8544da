"""Counting routing decisions on the device: once for each token, without waiting for the device.

Hooks see a decision again when activation checkpointing runs a forward a second time in backward, so what runs inside
backward is not counted. The counting itself happens outside the dispatch modes of selective checkpointing: operations
that only the first pass runs would shift the numbers by which that matches its saved results, and gradients would be
silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from lightning_longctx.callbacks.router_decisions import Extract, read_decisions, read_output
from lightning_longctx.callbacks.router_sites import RouterSite
from lightning_longctx.recompute import is_recomputing

__all__ = ["RouterCounts", "SiteCounts", "record_router_indices"]

# Columns before those of the experts: choices below -1, and choices beyond a capacity. So the column of an index is the
# index + 2, without a look-up.
_BEFORE = 2
# Columns behind them, counted from the end: choices of padding, forwards that told nothing, and tokens for which the
# batch's padding could not be told. Between them and a layer's last expert its choices of experts that do not exist.
_PADDING, _UNREAD, _UNMASKED = -3, -2, -1
_BEHIND = 4

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


class SiteCounts(NamedTuple):
    """What one layer of experts counted, on the host.

    Attributes:
        tokens: int64 ``[E]``, choices of each expert.
        padding: choices of padding.
        dropped: choices beyond an expert's capacity.
        outside: choices of experts that do not exist.
        unread: forwards that told nothing.
        unmasked: tokens for which the batch's padding could not be told.
    """

    tokens: Tensor
    padding: int
    dropped: int
    outside: int
    unread: int
    unmasked: int

    @property
    def is_silent(self) -> bool:
        """Whether the layer ran, and no decision was to be seen."""
        seen = int(self.tokens.sum()) + self.padding + self.dropped + self.outside
        return bool(self.unread) and not seen


class RouterCounts:
    """One matrix of counts for each place where decisions may show, and the hooks that fill it.

    Args:
        sites: the layers of experts.
        device: of the model.
        extract: reads the output of a router; None for the built-in rules.

    Attributes:
        active: whether forwards count now.
        padding: bool ``[N, 1]``, which tokens of the present micro-batch are padding; None if none is.
    """

    def __init__(self, sites: Sequence[RouterSite], device: torch.device, extract: Extract | None = None) -> None:
        self.sites = list(sites)
        self.active = False
        self.padding: Tensor | None = None
        self._extract = extract
        self._width = _BEFORE + max(site.num_experts for site in self.sites) + _BEHIND
        # One tensor each and no views of one: a compiled block then is the same program in every layer, where it would
        # be compiled anew for a place in a matrix.
        self._rows = [[self._zeros(device) for _ in _SOURCES] for _ in self.sites]
        self._largest = [torch.zeros((), dtype=torch.int64, device=device) for _ in self.sites]
        self._restored = torch.stack([rows[0] for rows in self._rows])
        self._one = torch.ones((), dtype=torch.int64, device=device)
        self._source: dict[int, int] = {}  # by site, once it has spoken
        self._handles: list[RemovableHandle] = []
        for number, site in enumerate(self.sites):
            self._attach(number, site)

    def detach(self) -> None:
        """Remove every hook and mark."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for site in self.sites:
            site.module.__dict__.pop(_MARK, None)

    @property
    def has_settled(self) -> bool:
        """Whether some site has spoken."""
        return bool(self._source)

    def settle(self) -> list[str]:
        """Choose for each site the best place that spoke, and listen to it alone. Reads from the device.

        Returns:
            Paths of sites that ran without any decision to be seen.
        """
        waiting = [number for number in range(len(self.sites)) if number not in self._source]
        if not waiting:
            return []
        counts = torch.stack([torch.stack(self._rows[number]) for number in waiting]).cpu()
        spoke, ran = counts[..., :_UNREAD].any(-1).tolist(), counts[..., _UNREAD].any(-1).tolist()
        for place, number in enumerate(waiting):
            if any(spoke[place]):
                self._source[number] = spoke[place].index(True)
        return [self.sites[number].path for place, number in enumerate(waiting) if ran[place] and not any(spoke[place])]

    def take(self) -> Tensor:
        """The counts of the window, int64 ``[sites, columns]`` on the device, and start a new one."""
        counts = self.peek()
        torch._foreach_zero_([row for rows in self._rows for row in rows])
        self._restored.zero_()
        return counts

    def peek(self) -> Tensor:
        """The counts of the window so far; see :meth:`take`."""
        chosen = [rows[self._source.get(number, _ROUTER)] for number, rows in enumerate(self._rows)]
        return self._restored + torch.stack(chosen)

    def largest(self) -> Tensor:
        """The largest index that each site has seen: int64 ``[sites]`` on the device; local."""
        return torch.stack(self._largest)

    def restore(self, counts: Tensor) -> None:
        """Go on with the counts of a saved window."""
        self._restored.copy_(counts)

    def read(self, counts: Tensor) -> list[SiteCounts]:
        """Take counts of :meth:`take` apart, on the host; sums over ranks as well as local ones."""
        found = []
        for site, row in zip(self.sites, counts.cpu(), strict=True):
            end = _BEFORE + site.num_experts
            padding, unread, unmasked = row[-3:].tolist()
            found.append(SiteCounts(row[_BEFORE:end], padding, int(row[1]), int(row[0] + row[end]), unread, unmasked))
        return found

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self._width, dtype=torch.int64, device=device)

    def _attach(self, number: int, site: RouterSite) -> None:
        experts, largest = site.num_experts, self._largest[number]
        recorded, of_router, of_experts = self._rows[number]

        def after_router(module: nn.Module, args: Any, output: Any) -> None:
            if self._listens(number, _ROUTER):
                self._count(of_router, largest, experts, lambda: self._read(module, output, experts))

        def before_experts(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self._listens(number, _EXPERTS):
                self._count(of_experts, largest, experts, lambda: read_decisions((args, kwargs), experts))

        def record(indices: Tensor) -> None:
            if self._listens(number, _RECORDED):
                self._count(recorded, largest, experts, lambda: indices.reshape(-1, indices.shape[-1]))

        self._handles += [router.register_forward_hook(after_router) for router in site.routers]
        if site.experts is not None:
            self._handles.append(site.experts.register_forward_pre_hook(before_experts, with_kwargs=True))
        site.module.__dict__[_MARK] = record

    def _listens(self, number: int, place: int) -> bool:
        if not self.active or torch.compiler.is_compiling():
            # The compiler traces the count into its graph, and decides itself what backward computes again. It must
            # see nothing here that later changes: it would compile again.
            return self.active
        return self._source.get(number, place) == place and not is_recomputing()

    def _read(self, module: nn.Module, output: Any, num_experts: int) -> Tensor | None:
        if self._extract is None:
            return read_output(module, output, num_experts)
        indices = self._extract(module, output)
        return None if indices is None else indices.reshape(-1, indices.shape[-1])

    def _count(self, row: Tensor, largest: Tensor, num_experts: int, read: Callable[[], Tensor | None]) -> None:
        if torch.compiler.is_compiling():
            self._add(row, largest, num_experts, read())
            return
        with torch.no_grad(), _disable_current_modes():
            self._add(row, largest, num_experts, read())

    def _add(self, row: Tensor, largest: Tensor, num_experts: int, indices: Tensor | None) -> None:
        """Add decisions ``[N, k]`` to a row: as few operations as will do, for they run in every layer."""
        if indices is None:
            row[_UNREAD] += 1
            return
        if not indices.numel():
            return
        indices = indices.long()
        columns = indices.clamp(-_BEFORE, num_experts).add_(_BEFORE)
        padding = self.padding
        if padding is not None and padding.shape[0] == indices.shape[0]:
            columns.masked_fill_(padding, self._width + _PADDING)
        elif padding is not None:
            row[_UNMASKED] += indices.shape[0]
        row.scatter_add_(0, columns.reshape(-1), self._one.expand(columns.numel()))
        largest.copy_(torch.maximum(largest, indices.amax()))
