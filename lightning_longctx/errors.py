"""Errors of the suite: each says which field, what rule, what value it got, and what to do.

One shape for every message makes a failed launch readable without the source. The parts are kept as attributes and as
``args``, so that an error survives pickling between processes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BatchContractError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DivergenceError",
    "FieldError",
    "raise_together",
]

# So many refusals are told in full; of the others only the fields.
_TOLD = 8


class FieldError(ValueError):
    """A value that breaks a rule.

    Args:
        field: the name the user knows, such as ``strategy.sequence_parallel_size`` or ``batch['cu_seqlens']``.
        rule: what must hold, as the rest of a sentence: ``"must divide the world size"``.
        got: the value, or the arithmetic that shows the breach.
        fix: what to do, as a sentence.

    Example:
        >>> print(FieldError("max_seq_len", "must be positive", 0, "Give a number of tokens such as 4096 or 512K."))
        `max_seq_len` must be positive, but got 0. Give a number of tokens such as 4096 or 512K.
    """

    def __init__(self, field: str, rule: str, got: object, fix: str) -> None:
        super().__init__(field, rule, got, fix)
        self.field = field
        self.rule = rule
        self.got = got
        self.fix = fix

    def __str__(self) -> str:
        return f"`{self.field}` {self.rule}, but got {self.got}. {self.fix}"


class ConfigurationError(FieldError):
    """A setting, or two settings together, that cannot work. Raised before any training step."""


class BatchContractError(FieldError):
    """A batch that is not what DESIGN calls a packed batch. The field is the key."""


class DataError(FieldError):
    """A source, file or record that cannot be used. The field names the source; ``got`` names file and line."""


class CheckpointError(FieldError):
    """A checkpoint that cannot be written, found or read as asked."""


class DivergenceError(FieldError):
    """A run whose loss is no longer a number. ``fix`` names the documents of the step, where they are known."""


def raise_together(errors: Sequence[FieldError]) -> None:
    """Raise what several fields were refused for as one error, so that all can be corrected at once; none, nothing.

    Args:
        errors: of fields that do not depend on each other.

    Raises:
        FieldError: the only one, or all in one of the first one's class.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        first, *others = errors[:_TOLD]
        told = [str(first.got), *(f"`{error.field}` {error.rule}, but got {error.got}" for error in others)]
        told += [f"and `{'`, `'.join(error.field for error in errors[_TOLD:])}` too"] if len(errors) > _TOLD else []
        fixes = " ".join(dict.fromkeys(error.fix for error in errors))
        raise type(first)(first.field, first.rule, "; ".join(told), fixes)
