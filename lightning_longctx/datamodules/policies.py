"""When a row may be made, and of which documents: the contract of a buffer policy, and the two published ones.

A policy sees lengths, never tokens or ranks, so that it can be simulated, tested by properties, and gives the same
choice after a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_longctx.datamodules.selection import Budget, PoolView, ordered_greedy
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted

__all__ = [
    "LONG_CONTEXT",
    "BufferPolicy",
    "ContextAwareBufferPolicy",
    "DocumentCountPolicy",
    "FixedBufferPolicy",
    "PackingFacts",
]

#: Where a count gate of 200 documents starts to cost minutes before the first row.
LONG_CONTEXT = 131_072


@dataclass(frozen=True)
class PackingFacts:
    """What a policy may ask about the run that it is used in.

    Attributes:
        max_seq_len: longest document in tokens.
        micro_batch_size: windows in a row.
        count_mode: what the budget counts: ``total`` tokens or ``effective`` ones (targets).
        runtime: where rows are made: ``main`` or ``worker``.
        modalities: the declared modality of each source.
        dynamic: whether rows are filled to a token budget; otherwise with a fixed number of documents.
    """

    max_seq_len: int
    micro_batch_size: int = 1
    count_mode: str = "total"
    runtime: str = "main"
    modalities: tuple[str, ...] = ("text",)
    dynamic: bool = True


class BufferPolicy(ABC):
    """When the pool is ready, and which of its documents go into the next row."""

    def resolve(self, facts: PackingFacts) -> BufferPolicy:
        """Return the policy to use in such a run: by default this one. Called once, before any document is read.

        Raises:
            ConfigurationError: the policy was not made for such a run.
        """
        return self

    @abstractmethod
    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """Whether a row may be chosen now. Not asked once the sources are exhausted.

        Args:
            view: the documents that wait, maybe none.
            budget: of the row.
        """

    @abstractmethod
    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """Choose a row: indices of documents that fit the budget together.

        Args:
            view: the documents that wait, at least one; each alone fits.
            budget: of the row.

        Returns:
            At least one index, each once, in the order of packing.
        """

    def describe(self) -> str:
        """The resolved gate, for the line at the start of a run."""
        return type(self).__name__

    def state_dict(self) -> dict[str, Any]:
        """What the policy remembers between rows. Nothing by default."""
        return {}

    # B027: a policy without memory has nothing to load, so this is no abstract method.
    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from ``state``."""


class FixedBufferPolicy(BufferPolicy):
    """Waits for a fixed number of candidates and a budget of tokens, then takes them in order, each that still fits.

    The oldest candidate is always taken, so nothing waits for ever. One pass over the pool for a row.

    Args:
        size: least number of candidates. Default 200, the published default of the policy that it reproduces. At 128K
            tokens and more it delays the first row by many documents: use ``adaptive``.

    Raises:
        ConfigurationError: ``size`` below 1.

    Example:
        >>> FixedBufferPolicy(size=3).select(PoolView([5, 6, 2], [5, 6, 2], [0, 0, 0], 0, 13, 13), Budget(8, 8, 4096))
        [0, 2]
    """

    def __init__(self, size: int = 200) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError("buffer_policy.size", "must be a positive integer", repr(size), "Set 1 or more.")
        self.size = size

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """Whether both gates are open: enough candidates, and enough tokens."""
        return len(view.lengths) >= self.size and (view.counted >= budget.counted or view.tokens >= budget.physical)

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """Take in order, oldest first, each candidate that still fits."""
        return ordered_greedy(view, budget).indices

    def describe(self) -> str:
        """The gate."""
        return f"fixed: at least {counted(self.size, 'document')} and the tokens of a row"


class DocumentCountPolicy(BufferPolicy):
    """Gives the oldest documents, always the same number of them: what ``dynamic: false`` means.

    Args:
        count: documents of a row.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """Whether there are enough documents."""
        return len(view.lengths) >= self.count

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """The oldest documents, as many as a row has; fewer at the end."""
        return list(range(min(self.count, len(view.lengths))))

    def describe(self) -> str:
        """The number."""
        return f"no token budget: {counted(self.count, 'document')} in each row"


class ContextAwareBufferPolicy(BufferPolicy):
    """The published policy for long windows: a gate of 24 documents at 524,288 and at 1,048,576 tokens.

    The gate is for each data-parallel rank and is never multiplied by their number; below a budget of tokens reading
    goes on whatever the count. It was measured for plain text in the main runtime with one window in a row, and refuses
    everything else.

    Example:
        >>> ContextAwareBufferPolicy().resolve(PackingFacts(max_seq_len=1_048_576)).describe()
        'context_aware: at least 24 documents and the tokens of a row'
    """

    GATES = {524_288: 24, 1_048_576: 24}

    def __init__(self) -> None:
        self._fixed: FixedBufferPolicy | None = None

    def resolve(self, facts: PackingFacts) -> ContextAwareBufferPolicy:
        """Look up the gate; again with the same facts changes nothing.

        Raises:
            ConfigurationError: facts that the policy was not measured for, with what to use instead.
        """
        fix = "Use `buffer_policy: adaptive`, which works everywhere, or `fixed`."
        rules: list[tuple[str, str, object, bool]] = [
            ("packing.dynamic", "be true", facts.dynamic, facts.dynamic),
            ("loading.runtime", "be main", facts.runtime, facts.runtime == "main"),
            ("packing.count_mode", "be total", facts.count_mode, facts.count_mode == "total"),
            ("micro_batch_size", "be 1", facts.micro_batch_size, facts.micro_batch_size == 1),
            ("sources.modality", "be text", sorted(set(facts.modalities)), set(facts.modalities) <= {"text"}),
            ("max_seq_len", f"be one of {sorted(self.GATES)}", facts.max_seq_len, facts.max_seq_len in self.GATES),
        ]
        for field, rule, got, holds in rules:
            if not holds:
                raise ConfigurationError(f"data.{field}", f"must {rule} under `context_aware`", got, fix)
        self._fixed = FixedBufferPolicy(self.GATES[facts.max_seq_len])
        return self

    def is_ready(self, view: PoolView, budget: Budget) -> bool:
        """As the fixed gate."""
        return self._gate().is_ready(view, budget)

    def select(self, view: PoolView, budget: Budget) -> list[int]:
        """As the fixed gate."""
        return self._gate().select(view, budget)

    def describe(self) -> str:
        """The resolved gate."""
        return f"context_aware{self._gate().describe().removeprefix('fixed')}"

    def _gate(self) -> FixedBufferPolicy:
        if self._fixed is None:
            fix = "Call `resolve(PackingFacts(...))`, which tells the window and what is counted."
            raise ConfigurationError("buffer_policy", "must be resolved before it is used", "context_aware", fix)
        return self._fixed
