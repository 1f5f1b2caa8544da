"""The sums of one window on one rank: what each micro-batch adds, and what was wrong with it.

Nothing is raised here. A rank that stopped alone would leave the others waiting in their next collective, so a problem
is kept until all ranks can agree on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.callbacks.channel_batch import BatchReader, TokenLosses, losses_of_output
from lightning_longctx.callbacks.channel_sums import ChannelSums, Count, SlotTotals, all_reduce_totals
from lightning_longctx.callbacks.channel_values import coverage_of
from lightning_longctx.callbacks.source_names import SourceTable, agree_on_names
from lightning_longctx.callbacks.step_sums import count_step_targets, returned_nothing
from lightning_longctx.errors import BatchContractError
from lightning_longctx.units import counted

__all__ = ["MAX_LOSS_CALLS", "ChannelWindow", "settle"]

#: Loss calls of one forward that are told apart, where a hook watches them. A fixed number, since the reduced tensor
#: has a part for each on every rank.
MAX_LOSS_CALLS = 4


# Micro-batches of a window whose names are compared with those that are known.
_MOST_NAMED = 8


class ChannelWindow:
    """Adds up micro-batches.

    Args:
        reader: tells the slots of tokens.
        parts: number of loss calls to keep apart.
        device: where losses live.
        name_key: where batches hold the names of their sources; None if they do not.
        counters: of ``samples`` and ``input_tokens``, what to count besides targets.

    Attributes:
        problem: the first thing that was wrong with a batch.
        totals: sums of the finished steps of the window, for each part; local until the owner reduces them.
    """

    def __init__(
        self,
        reader: BatchReader,
        parts: int,
        device: torch.device,
        name_key: str | None = None,
        counters: Collection[str] = (),
    ) -> None:
        self.problem: BatchContractError | None = None
        self._reader = reader
        self._sums = [ChannelSums(reader.table.slots, device) for _ in range(parts)]
        self.totals = [sums.totals() for sums in self._sums]
        self._device = device
        self._name_key = name_key
        self._counters = frozenset(counters)
        self._named: list[tuple[Tensor, list[str]]] = []

    @torch.no_grad()
    def add(self, output: Any, batch: Any, calls: Sequence[TokenLosses] = ()) -> None:
        """Add one micro-batch. Nothing is read on the host.

        Args:
            output: what the step returned; None or an empty mapping (as Lightning has it) if it skipped the batch.
            batch: this rank's part.
            calls: what a :class:`LossHook` recorded; used where the output has no ``per_token_loss``.
        """
        if returned_nothing(output):
            return
        if not isinstance(batch, Mapping):
            fix = "Give batches as mappings."
            self.note(BatchContractError("batch", "must be a mapping that holds source ids", type(batch).__name__, fix))
            return
        try:
            found = self._losses(output, batch, calls)
        except BatchContractError as error:
            self.note(error)
            if (targets := count_step_targets(batch)) is not None:
                self._sums[0].add_unknown_targets(targets)
            return
        for sums, (losses, is_target) in zip(self._sums, found, strict=False):
            sums.add(losses, is_target, self._slots(batch, losses))
        self._count(batch, found[0].losses)
        self._keep_names(batch)

    def note(self, problem: BatchContractError) -> None:
        """Keep a problem, unless there was one before."""
        self.problem = self.problem or problem

    def names(self) -> dict[int, str]:
        """Names by slot that batches gave and the table does not have. Reads ids on the host.

        A name that contradicts another is a problem: the sums of that source would be those of two.
        """
        known, trial = self._reader.table.learned(), SourceTable()
        for slot, name in known.items():
            trial.learn(slot, name)
        for ids, names in self._named:
            for slot, name in zip(trial.slots_of(ids).tolist(), names, strict=True):
                if not trial.learn(slot, name):
                    self.note(_contradiction(trial.contradiction(slot, name)))
        return {slot: name for slot, name in trial.learned().items() if slot not in known}

    def commit(self) -> None:
        """Add what came since the last commit to :attr:`totals`: its step is done."""
        for total, sums in zip(self.totals, self._sums, strict=True):
            total.add_(sums.totals())
        self.discard()

    def discard(self) -> None:
        """Forget what came since the last commit."""
        for sums in self._sums:
            sums.zero_()

    def reset(self) -> None:
        """Start a new window."""
        self.discard()
        for total in self.totals:
            total.zero_()
        self.problem, self._named = None, []

    def _losses(self, output: Any, batch: Mapping[str, Any], calls: Sequence[TokenLosses]) -> Sequence[TokenLosses]:
        per_token = output.get("per_token_loss") if isinstance(output, Mapping) else None
        if isinstance(per_token, Tensor):
            return [losses_of_output(per_token, batch)]
        if not calls:
            fix = "Return it (`causal_lm_loss` gives it), or let `loss_function: true` watch a Hugging Face model."
            raise BatchContractError("training_step['per_token_loss']", "must be returned", "an output without it", fix)
        if len(calls) > len(self._sums):
            fix = "Return `per_token_loss` from the step instead."
            got = f"{len(calls)} calls"
            self.note(BatchContractError("loss_function", f"may be called {len(self._sums)} times a step", got, fix))
        return calls

    def _slots(self, batch: Mapping[str, Any], losses: Tensor) -> Tensor:
        try:
            return self._reader.slots_of_targets(batch, losses)
        except BatchContractError as error:
            self.note(error)
            return torch.full(losses.shape, -1, device=losses.device)

    def _count(self, batch: Mapping[str, Any], losses: Tensor) -> None:
        if self.problem is not None:
            return
        if "input_tokens" in self._counters:
            tokens = batch.get("input_ids")
            like = tokens if isinstance(tokens, Tensor) and tokens.dim() == 2 else losses
            self._sums[0].count(Count.TOKENS, self._reader.slots_of_tokens(batch, like))
        if "samples" in self._counters:
            self._sums[0].count(Count.SAMPLES, self._reader.slots_of_samples(batch, self._device))

    def _keep_names(self, batch: Mapping[str, Any]) -> None:
        if self._name_key is None or not self._reader.table.is_open or self.problem is not None:
            return
        try:
            ids, names = self._reader.named_ids(batch, self._name_key)
        except BatchContractError as error:
            self.note(error)
            return
        # What contradicts known names shows in a few batches too; the names of all would fill the memory.
        if len(self._named) < _MOST_NAMED or not self._reader.table.knows(names):
            self._named.append((ids, names))


def settle(
    parts: Sequence[SlotTotals], windows: Sequence[ChannelWindow], table: SourceTable, group: dist.ProcessGroup | None
) -> BatchContractError | None:
    """Sum windows over ranks in place, and agree on new names and on what was wrong anywhere.

    One all-reduce; a gather of names follows where some rank has found one, which is rare.

    Args:
        parts: the totals of all windows.
        windows: where they come from: for their problems and names.
        table: of the sources; learns names.
        group: of the ranks with distinct tokens; None for one rank.

    Returns:
        What is missing, on every rank if it is missing on any; None if each target has a known source.
    """
    found: dict[int, str] = {}
    for window in windows:
        found = window.names() | found
    problem = next((window.problem for window in windows if window.problem is not None), None)
    flags = torch.tensor([problem is not None, bool(found)], dtype=torch.int64, device=parts[0].losses.device)
    all_reduce_totals(parts, flags, group)
    problems, news = flags.tolist()
    if news and (contradictions := agree_on_names(table, found, group)):
        problem = problem or _contradiction(contradictions[0])
    recorded, supervised = coverage_of(parts[:: len(parts) // len(windows)])
    if problem is not None or (not problems and recorded == supervised):
        return problem
    got = f"{supervised - recorded:,} of {counted(supervised, 'target')} without" + " (see another rank)" * bool(
        problems
    )
    fix = "Give each token, document or row an id, and name every id in `source_names`."
    return BatchContractError("batch[source_key]", "must give each target a known source", got, fix)


def _contradiction(got: str) -> BatchContractError:
    fix = "Number sources alike in all batches and on all ranks: one id for each name."
    return BatchContractError("batch[source_name_key]", "must give each source id one name of its own", got, fix)
