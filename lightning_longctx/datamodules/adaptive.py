"""The default policy: a full row after the fewest documents, and full rows for the whole run.

Count gates wait for a number of documents that is too large for long windows and too small for short ones. This policy
has no count: it waits for a budget of tokens, looks for the subset of the pool that fills the row best, and reads on
only while that subset falls short. Measured against the gates in docs/buffer_policies.md (benchmarks/packing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.selection import Budget, PoolView, Selection, best_row
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import TokenCountLike, parse_token_count

__all__ = ["AdaptiveBufferPolicy", "PoolDepth"]

# A row that is not full yet may cost this many further documents, and this part of a window of tokens beside the gap
# itself, before it is given as it is. Only the worst rows depend on them (0 to 16 documents: within 0.1 points).
_EXTRA_DOCUMENTS = 4
_EXTRA_WINDOW = 0.25
# Looking again after each document costs more than it finds in a large pool.
_LOOK_AGAIN_SHARE = 64
_SETTLED = 0.998  # average fill at which a pool is deep enough
_SHALLOW = 4  # windows: below that old documents are preferred to long ones again
# While rows fall short a document may wait this many times longer: being forced to take the oldest is what costs most
# on such streams (steady fill 99.58 % at twice, 99.86 % without a limit).
_PATIENCE = 8
_FUTILE_FILL, _FUTILE_GAIN, _FUTILE_ROWS = 0.90, 0.005, 256  # see PoolDepth


@dataclass
class PoolDepth:
    """How deep the pool should be: deeper while rows fall short, and no deeper where that does not help.

    Attributes:
        target: tokens the pool should hold.
        average: running average of the fill, 0.9 old and 0.1 new; None before the first row.
        hard: whether rows fall short, so that long documents are preferred and documents may wait longer.
        paused: rows until the pool may grow again, after it doubled without any gain.
        mark_target: depth when the gain was last looked at.
        mark_average: average fill at that time.
    """

    target: float = 0.0
    average: float | None = None
    hard: bool = False
    paused: int = 0
    mark_target: float = 0.0
    mark_average: float = 0.0

    def after_row(self, selection: Selection, goal: float, left: int, window: int, cap: int) -> None:
        """Learn from a row.

        Args:
            selection: the row.
            goal: fill that was wanted.
            left: tokens that stay in the pool.
            window: tokens of a full row.
            cap: most tokens of a pool.
        """
        used = selection.fill * window
        old = selection.fill if self.average is None else self.average
        average = self.average = 0.9 * old + 0.1 * selection.fill
        self.paused = max(0, self.paused - 1)
        if selection.fill < goal and average < _SETTLED and not self.paused:
            self.target = min(cap, max(self.target, left + used) + used / 2)
            self.hard = True
            self._look_for_gain(average)
        if average >= _SETTLED and left < _SHALLOW * window:
            self.hard = False

    def _look_for_gain(self, average: float) -> None:
        if not self.mark_target:
            self.mark_target, self.mark_average = self.target, average
        elif self.target < 2 * self.mark_target:
            return
        elif average < _FUTILE_FILL and average - self.mark_average < _FUTILE_GAIN:
            # Documents of just over half a window never fill one: twice the depth gained nothing, so the pool shrinks
            # again, and a later try starts from there.
            self.paused = _FUTILE_ROWS
            self.target = self.mark_target = self.mark_average = 0.0
        else:
            self.mark_target, self.mark_average = self.target, average


class AdaptiveBufferPolicy(BufferPolicy):
    """Gives a row as soon as some subset of the pool fills it, and deepens the pool only while none does.

    A row is ready when the pool holds its budget of tokens and one of these holds: the best subset reaches the target;
    four documents and a quarter window more were read without reaching it; the pool is at its cap; the sources are
    exhausted. Old documents are preferred, and the oldest is taken at the latest after ``max_wait`` rows (eight
    times as many while rows fall short). There is no randomness, so a resume chooses as the unbroken run.

    Args:
        fill_target: wanted fill. Default 0.998: steady fills of 99.7 to 99.99 % at the same cold start as 0.985.
        first_fill_target: fill at which the first row is given. Default 0.985: it comes after the fewest documents, and
            is then made of the fullest subset there is.
        max_wait: rows after which the oldest document is taken; eight times as many while rows fall short. Default 32:
            easy streams keep their order, and less costs fill (benchmarks/packing).
        max_pool_tokens: most tokens that wait. Default None: 128 windows, of which easy streams use 2 to 6. At the cap
            the best row there is is given, and nothing is lost.
        max_pool_documents: most documents that wait. Default 4096: choosing stays below 10 ms.
        max_pool_bytes: most memory of waiting tokens, 8 bytes each (ids and labels). Default 1 GiB.

    Raises:
        ConfigurationError: a target outside (0, 1], or a limit below 1.

    Example:
        >>> from lightning_longctx.datamodules import simulate_packing
        >>> report = simulate_packing([60, 50, 40, 55, 45] * 20, "adaptive", max_tokens_per_batch=100, micro_batches=40)
        >>> report.first_documents, report.steady_fill
        (3, 1.0)
    """

    def __init__(
        self,
        fill_target: float = 0.998,
        first_fill_target: float = 0.985,
        max_wait: int = 32,
        max_pool_tokens: TokenCountLike | None = None,
        max_pool_documents: int = 4096,
        max_pool_bytes: int = 2**30,
    ) -> None:
        for name, value in (("fill_target", fill_target), ("first_fill_target", first_fill_target)):
            if not 0 < value <= 1:
                fix = "Write a part of the window, such as 0.998."
                raise ConfigurationError(f"buffer_policy.{name}", "must be above 0 and at most 1", value, fix)
        limits = {"max_wait": max_wait, "max_pool_documents": max_pool_documents, "max_pool_bytes": max_pool_bytes}
        for name, limit in limits.items():
            if limit < 1:
                raise ConfigurationError(f"buffer_policy.{name}", "must be at least 1", limit, "Leave it out.")
        self.fill_target = fill_target
        self.first_fill_target = first_fill_target
        self.max_wait = max_wait
        field = "buffer_policy.max_pool_tokens"
        self.max_pool_tokens = None if max_pool_tokens is None else parse_token_count(max_pool_tokens, field)
        self.max_pool_documents = max_pool_documents
        self.max_pool_bytes = max_pool_bytes
        self._depth = PoolDepth()
        self._rows = 0
        self._opened: tuple[int, int] | None = None  # documents and tokens of the pool when it first held a budget
        self._look_at = 0  # size of the pool at which a subset is looked for again
        self._best: tuple[Sequence[int], int, Selection] | None = None  # for a pool of these lengths, so many of them

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """Whether a row may be chosen now; see the class."""
        if view.counted < budget.counted and view.tokens < budget.physical:
            return False
        size = len(view.lengths)
        if self._opened is None:
            self._opened = (size, view.tokens)
        if size >= self.max_pool_documents or view.tokens >= self._cap(budget):
            return True
        if view.tokens < self._depth.target and not self._depth.paused:
            return False
        if size < self._look_at:
            return False
        fill = self._look(view, budget).fill
        if fill >= self._goal or self._depth.paused:
            return True
        self._look_at = size + max(1, size // _LOOK_AGAIN_SHARE)
        documents, tokens = size - self._opened[0], view.tokens - self._opened[1]
        return documents >= _EXTRA_DOCUMENTS and tokens >= (1 - fill + _EXTRA_WINDOW) * budget.physical

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """The row, oldest documents preferred; see the class."""
        selection = self._look(view, budget)
        left = view.tokens - sum(view.lengths[index] for index in selection.indices)
        self._depth.after_row(selection, self._goal, left, budget.physical, self._cap(budget))
        self._rows += 1
        self._opened, self._look_at, self._best = None, 0, None
        return selection.indices

    def describe(self) -> str:
        """The targets."""
        return (
            f"adaptive: the first at {self.first_fill_target:.1%} of its tokens, later ones at {self.fill_target:.1%}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Depth and number of rows."""
        return {"rows": self._rows, **asdict(self._depth)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        depth = dict(state)
        self._rows = depth.pop("rows")
        self._depth = PoolDepth(**depth)

    @property
    def _goal(self) -> float:
        return self.fill_target if self._rows else self.first_fill_target

    def _cap(self, budget: Budget) -> int:
        windows = self.max_pool_tokens if self.max_pool_tokens is not None else 128 * budget.physical
        return max(budget.physical, min(windows, self.max_pool_bytes // 8))

    def _look(self, view: PoolView, budget: Budget) -> Selection:
        size = len(view.lengths)
        # The same documents in the same order: a view of part of the pool has lists of its own.
        if self._best is None or self._best[0] is not view.lengths or self._best[1] != size:
            wait = self.max_wait * (_PATIENCE if self._depth.hard else 1)
            oldest = view.oldest
            first = [oldest] if view.row - view.arrivals[oldest] >= wait else []
            row = best_row(view, budget, self.fill_target, first, self._depth.hard)
            self._best = (view.lengths, size, row)
        return self._best[2]
