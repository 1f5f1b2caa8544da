"""One count of each step for all callbacks of a trainer: the sums of its micro-batches, joined over ranks once.

Several callbacks want to know what a step was made of. Each asks :func:`tally_of` and calls the same methods in the
same hooks; the first one does the work. So there is one all-reduce a step however many ask, and a run that stops by
tokens stops before the last step is logged, in whatever order ``callbacks:`` lists them.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.callbacks.step_sums import Field, StepSums, returned_nothing
from lightning_longctx.topology import Topology, topology_of

__all__ = ["NO_TOKENS", "Clock", "StepTally", "TallyMember", "TokensSeen", "tally_of"]

# A step may be this much larger than the largest so far (or than the budget) without a limit being noticed late.
_MARGIN = 2


class TokensSeen(NamedTuple):
    """Tokens of a run so far, over all ranks and resumes, in finished steps.

    Attributes:
        source_tokens: all that are not padding.
        target_tokens: those with a target.
    """

    source_tokens: int = 0
    target_tokens: int = 0

    def largest(self, other: TokensSeen) -> TokensSeen:
        """The larger of each count: one of two callbacks may have been added later than the other."""
        return TokensSeen(*map(max, self, other))

    def nearest(self, other: TokensSeen) -> TokensSeen:
        """The smaller of each limit; 0 is no limit."""
        return TokensSeen(*(min(filter(None, pair), default=0) for pair in zip(self, other, strict=True)))

    def reaches(self, limits: TokensSeen) -> bool:
        """Whether one of the limits is reached; 0 is no limit."""
        return any(limit and count >= limit for count, limit in zip(self, limits, strict=True))


NO_TOKENS = TokensSeen()


class StepTally:
    """What the present step of a trainer's fit is made of, and what all steps were.

    Attributes:
        topology: the run's.
        values: ``[len(Field)]``, local sums of the step under way; a callback may write into it what it measures.
        finished: ``[len(Field)]``, sums over all ranks of the step that this micro-batch ended; None if it ended none.
        previous_step: ``trainer.global_step`` before that step.
        reached: tokens seen when a limit stopped the run; None before.
        exact: whether the last micro-batch had a loss for each token.
        clock: of training, without what lies between its pause and resume.
    """

    def __init__(self) -> None:
        self.topology = Topology()
        self.clock = Clock()
        self.finished: Tensor | None = None
        self.previous_step = 0
        self.reached: TokensSeen | None = None
        self.exact = True
        self._active = False
        self._sums = StepSums(torch.device("cpu"))
        self._seen = self._limits = NO_TOKENS
        self._micro_batch: int | None = None
        self._last_step = 0
        self._since_begin = torch.zeros(4)
        self._steps_to_read = 0

    @property
    def values(self) -> Tensor:
        """Local sums of the step under way."""
        return self._sums.values

    @property
    def seen(self) -> TokensSeen:
        """Tokens of all finished steps. Waits for the device."""
        return self._read()[0]

    def begin(self, trainer: Any, seen: TokensSeen, limits: TokensSeen = NO_TOKENS) -> None:
        """Make ready for a fit, in ``on_train_start``; later callers of the same fit add what they know.

        Args:
            trainer: its fit begins.
            seen: tokens of earlier fits and of the checkpoint, as far as the caller remembers.
            limits: stop the run when either count is reached, at the end of a step; 0 is no limit.
        """
        if not self._active:
            self._reset(trainer)
        self._seen = self._seen.largest(seen)
        self._limits = self._limits.nearest(limits)
        self._stop(trainer, self._seen)

    def end(self) -> None:
        """Note that the fit is over, in ``on_train_end`` and ``on_exception``: the next :meth:`begin` starts anew."""
        self._active = False

    def forget_unfinished_step(self) -> None:
        """Forget micro-batches that no step followed: Lightning has dropped their gradients when an epoch begins."""
        self.values.zero_()
        self._steps_to_read = 0  # a new epoch may accumulate more micro-batches

    def advance(self, trainer: Any, outputs: Any, batch: Any) -> None:
        """Add a micro-batch, in ``on_train_batch_end``; at the end of a step join it over ranks.

        Every rank calls it at every micro-batch.
        """
        number = trainer.fit_loop.total_batch_idx
        if number == self._micro_batch:
            return  # another callback did it
        self._micro_batch, self.finished = number, None
        automatic = trainer.lightning_module.automatic_optimization
        if automatic and returned_nothing(outputs):
            self.exact = True  # the step has skipped this micro-batch: nothing was trained on
        else:
            self.exact = self._sums.add(outputs, batch, trainer.accumulate_grad_batches if automatic else 1)
        if trainer.global_step == self._last_step:
            return
        self.previous_step, self._last_step = self._last_step, trainer.global_step
        self.values[Field.SECONDS] = self.clock.lap()
        self._reduce()
        self.finished = self.values.clone()
        self.values.zero_()
        self._count(self.finished)
        if any(self._limits):
            self._stop_at_limit(trainer)

    def _reset(self, trainer: Any) -> None:
        self.topology = topology_of(trainer)
        self._sums = StepSums(trainer.strategy.root_device)
        self._since_begin = torch.zeros_like(self.values[:4])
        self._active, self._seen, self._limits = True, NO_TOKENS, NO_TOKENS
        self._micro_batch, self.finished, self.reached, self._steps_to_read = None, None, None, 0
        self.previous_step = self._last_step = trainer.global_step
        self.clock.start()

    def _reduce(self) -> None:
        topology, values = self.topology, self.values
        if topology.token_group is not None:
            dist.all_reduce(values, group=topology.token_group)
        token_ranks = topology.dp_size * topology.sp_size
        if topology.world_size > token_ranks:
            # Tensor parallelism: ranks outside the token group hold other shards of the gradients, or copies of them,
            # and have clocks of their own. Each sum over a token group is met once for each of its ranks.
            of_all_ranks = values[Field.GRADIENT_SQUARES :]
            dist.all_reduce(of_all_ranks, group=dist.group.WORLD)
            of_all_ranks /= token_ranks

    def _count(self, step: Tensor) -> None:
        since = self._since_begin
        since[0] += step[Field.TOKENS]
        since[1] += step[Field.TARGETS]
        since[2] = torch.maximum(since[2], step[Field.TOKENS])
        since[3] = torch.maximum(since[3], step[Field.BUDGET] / self.topology.sp_size)

    def _read(self) -> tuple[TokensSeen, float]:
        """Tokens of all finished steps, and the largest step that must be expected."""
        source, target, *largest = self._since_begin.tolist()
        return TokensSeen(self._seen[0] + round(source), self._seen[1] + round(target)), max(largest)

    def _stop_at_limit(self, trainer: Any) -> None:
        """Stop the run if a limit is reached. The count is read only where that may be: the device is not waited for.

        What decides on reading is equal on all ranks, so they stop together.
        """
        self._steps_to_read -= 1
        if self._steps_to_read > 0:
            return
        seen, largest = self._read()
        left = min(limit - count for count, limit in zip(seen, self._limits, strict=True) if limit)
        self._stop(trainer, seen)
        self._steps_to_read = max(1, int(left // (_MARGIN * max(largest, 1))))

    def _stop(self, trainer: Any, seen: TokensSeen) -> None:
        if seen.reaches(self._limits):
            trainer.should_stop = True
            self.reached = self.reached or seen


class TallyMember:
    """A callback's part in the tally of its trainer: it remembers the tokens between fits and in checkpoints.

    Args:
        limits: stop the run when either count is reached; 0 is no limit.

    Attributes:
        tally: of the fit under way; None outside of one.
    """

    def __init__(self, limits: TokensSeen = NO_TOKENS) -> None:
        self.tally: StepTally | None = None
        self._limits = limits
        self._remembered = NO_TOKENS

    @property
    def seen(self) -> TokensSeen:
        """Tokens of all finished steps, over all ranks and resumes. Waits for the device during a fit."""
        return self._remembered if self.tally is None else self.tally.seen

    def begin(self, trainer: Any) -> StepTally:
        """Join the tally, in ``on_train_start``."""
        remembered, self.tally = self.seen, tally_of(trainer)
        self.tally.begin(trainer, remembered, self._limits)
        return self.tally

    def end(self) -> None:
        """Leave the tally, in ``on_train_end``."""
        if self.tally is not None:
            self._remembered = self.tally.seen
            self.tally.end()
            self.tally = None

    def abort(self) -> None:
        """Note that the fit failed, in ``on_exception``. Reads nothing: the device may be lost."""
        if self.tally is not None:
            self.tally.end()

    def state_dict(self) -> dict[str, int]:
        """Source and target tokens: equal on every rank and in every layout, without a collective."""
        return self.seen._asdict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where a checkpoint stopped."""
        self._remembered = TokensSeen(**{name: int(count) for name, count in state_dict.items()})
        self.tally = None


class Clock:
    """Wall time of training, without what lies between pause and resume."""

    def __init__(self) -> None:
        self._mark: float | None = None
        self._paused_at: float | None = None

    def start(self) -> None:
        """Start from 0."""
        self._mark, self._paused_at = time.perf_counter(), None

    def pause(self) -> None:
        """Leave out what follows."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """Count again. A clock that was never started stays at 0."""
        if self._mark is not None and self._paused_at is not None:
            self._mark += time.perf_counter() - self._paused_at
        self._paused_at = None

    def lap(self) -> float:
        """Seconds since the last lap, or since the start."""
        assert self._mark is not None
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds


def tally_of(trainer: Any) -> StepTally:
    """Return the one tally of a trainer."""
    return _tallies.setdefault(trainer, StepTally())


# Beside the trainer, because it is not ours to write on.
_tallies: WeakKeyDictionary[Any, StepTally] = WeakKeyDictionary()
