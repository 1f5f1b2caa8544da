"""The arithmetic of budgets: what a row may hold, and what must divide what."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from lightning_longctx.datamodules.selection import Budget
from lightning_longctx.datamodules.settings import PackingSettings, WarmupSettings
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.units import counted, parse_token_count

__all__ = [
    "accumulation",
    "check_budget",
    "check_micro_batch_size",
    "check_one_accumulation",
    "check_warmup",
    "row_budget",
]

# Document bounds are int32, as variable-length attention kernels want them.
_MAX_ROW = 2**31 - 1


def check_micro_batch_size(value: int) -> int:
    """Return the number of windows in a row.

    Raises:
        ConfigurationError: not a positive integer.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        fix = "Write the number of windows in a row, such as 1."
        raise ConfigurationError("data.micro_batch_size", "must be a positive integer", repr(value), fix)
    return value


def check_budget(max_tokens_per_batch: int, packing: PackingSettings, sp_size: int) -> None:
    """Check that a full row can be cut into equal shards.

    Raises:
        ConfigurationError: the budget is no multiple of the padding and the sequence-parallel size.
    """
    if max_tokens_per_batch > _MAX_ROW:
        fix = "Use a shorter window or a smaller micro_batch_size."
        rule = f"times micro_batch_size must be at most {_MAX_ROW:,} (bounds are 32-bit)"
        raise ConfigurationError("data.max_seq_len", rule, f"{max_tokens_per_batch:,}", fix)
    multiple = lcm(packing.pad_to_multiple_of, sp_size)
    rest = max_tokens_per_batch % multiple
    if rest:
        raise ConfigurationError(
            "data.max_seq_len",
            f"times micro_batch_size must be a multiple of {multiple}, which is the least common multiple of "
            f"pad_to_multiple_of = {packing.pad_to_multiple_of} and sequence_parallel_size = {sp_size}",
            f"{max_tokens_per_batch} = {max_tokens_per_batch // multiple} x {multiple} + {rest}",
            f"Use {max_tokens_per_batch - rest or multiple}.",
        )


def check_warmup(warmup: WarmupSettings, max_tokens_per_batch: int) -> None:
    """Check that a growing budget starts below the full one.

    Raises:
        ConfigurationError: it starts above.
    """
    if warmup.steps and parse_token_count(warmup.initial_tokens) > max_tokens_per_batch:
        field, rule = "data.loading.warmup.initial_tokens", f"must be at most {max_tokens_per_batch:,}, the full budget"
        raise ConfigurationError(field, rule, warmup.initial_tokens, "Start lower, or leave the warm-up out.")


def accumulation(global_batch_tokens: int, max_tokens_per_batch: int, dp_size: int) -> int:
    """Micro-batches of a step.

    Raises:
        ConfigurationError: ``global_batch_tokens`` is no multiple of one micro-batch on all ranks.
    """
    tokens = max_tokens_per_batch * dp_size
    steps, rest = divmod(global_batch_tokens, tokens)
    if rest or not steps:
        raise ConfigurationError(
            "data.global_batch_tokens",
            f"must be a multiple of one micro-batch on all ranks: {counted(max_tokens_per_batch, 'token')} x "
            f"{counted(dp_size, 'data-parallel rank')} = {tokens:,}",
            f"{global_batch_tokens:,} = {steps:,} x {tokens:,} + {rest:,}",
            f"Use {steps * tokens} or {(steps + 1) * tokens}." if steps else f"Use {tokens} or more.",
        )
    return steps


def check_one_accumulation(steps: int, own: int, callbacks: Iterable[object]) -> None:
    """Check that ``global_batch_tokens`` alone says how many micro-batches a step has.

    Args:
        steps: what it says.
        own: ``trainer.accumulate_grad_batches``.
        callbacks: of the trainer.

    Raises:
        ConfigurationError: the Trainer or a callback says something else.
    """
    fix = "Leave one out."
    if own not in (1, steps):
        got = f"{own} where data.global_batch_tokens gives {steps}"
        raise ConfigurationError("trainer.accumulate_grad_batches", "must not be set twice", got, fix)
    for callback in callbacks:
        if callable(getattr(callback, "get_accumulate_grad_batches", None)):  # Lightning's scheduler of accumulation
            got = f"{counted(steps, 'micro-batch')} a step beside {type(callback).__name__}"
            raise ConfigurationError("data.global_batch_tokens", "must be alone in setting the accumulation", got, fix)


def row_budget(packing: PackingSettings, max_tokens_per_batch: int, max_seq_len: int, multiple: int) -> Budget:
    """What a row may hold.

    Args:
        packing: what is counted, and the caps.
        max_tokens_per_batch: the budget.
        max_seq_len: longest document.
        multiple: of which a row's length is one; the cap is rounded down to it, so that padding never exceeds it.
    """
    if not packing.dynamic:
        physical = -(-packing.documents_per_batch * max_seq_len // multiple) * multiple
    elif packing.count_mode == "effective":
        physical = int(max_tokens_per_batch * packing.physical_overflow_ratio) // multiple * multiple
    else:
        physical = max_tokens_per_batch // multiple * multiple
    return Budget(max_tokens_per_batch, physical, packing.max_docs_per_pack)
