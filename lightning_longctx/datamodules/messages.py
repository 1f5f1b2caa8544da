"""What a run says about its data: before the first document, after the first row, and at the end."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_longctx.datamodules.policies import LONG_CONTEXT, BufferPolicy, FixedBufferPolicy
from lightning_longctx.units import counted

__all__ = [
    "closing_lines",
    "cold_start_warning",
    "first_row_line",
    "stand_in_line",
    "start_line",
    "step_line",
    "summarize",
]


def start_line(max_tokens_per_batch: int, dp_size: int, policy: BufferPolicy, counters: Mapping[str, int]) -> str:
    """What a row holds and waits for, and how many documents that is, as far as any were read (after a resume)."""
    read, tokens = counters["documents_read"], counters["tokens_read"]
    expected = (
        f"; about {counted(max_tokens_per_batch * read / tokens, 'document')} each, as those so far" if tokens else ""
    )
    rows = f"{counted(max_tokens_per_batch, 'token')} x {counted(dp_size, 'data-parallel rank')}"
    return f"Rows: {rows}; {policy.describe()}{expected}."


def step_line(max_tokens_per_batch: int, dp_size: int, sp_size: int, accumulate: int) -> str:
    """What an optimizer step holds, and over which devices it is spread. Speed is told once it was measured."""
    tokens = max_tokens_per_batch * accumulate * dp_size
    return (
        f"Step: {counted(max_tokens_per_batch, 'token')} x {counted(accumulate, 'micro-batch')} x"
        f" {counted(dp_size, 'data-parallel rank')} = {counted(tokens, 'token')}, on {dp_size} data-parallel x"
        f" {sp_size} sequence-parallel = {counted(dp_size * sp_size, 'device')}."
    )


def cold_start_warning(max_seq_len: int, policy: BufferPolicy) -> str | None:
    """What a count gate costs at long context, and what to use instead; None where it costs little."""
    if not isinstance(policy, FixedBufferPolicy) or max_seq_len < LONG_CONTEXT:
        return None
    return (
        f"`data.buffer_policy: fixed` reads at least {counted(policy.size, 'document')} before the first row, on every"
        f" rank, whatever {max_seq_len:,} tokens need. `buffer_policy: adaptive` starts after the fewest documents that"
        " fill the window."
    )


def first_row_line(counters: Mapping[str, int], max_tokens_per_batch: int) -> str:
    """What was read for the first row of this process, which tells whether the policy suits the data."""
    read, rows = counters["documents_read"], counters["rows"]
    fill = counters["tokens_packed"] / (rows * max_tokens_per_batch) if rows else 0.0
    since = "" if rows == 1 else f" for {counted(rows, 'row')} since the data began"
    length = counted(counters["tokens_read"] / read if read else 0, "token")
    return f"First row: {counted(read, 'document')} read{since} ({length} on average), filled to {fill:.1%}."


def closing_lines(counters: Mapping[str, int], max_tokens_per_batch: int, policy: BufferPolicy) -> list[str]:
    """What the first row of a run waited for, and what the published count gate would have waited for at least.

    Args:
        counters: after the first row of this process; nothing is said where that was not the first of the data.
        max_tokens_per_batch: the budget of a row.
        policy: the one of the run.
    """
    if counters.get("rows") != 1:
        return []
    read, gate = counters["documents_read"], FixedBufferPolicy().size
    line = f"First row: {counted(read, 'document')} read, filled to"
    line += f" {counters['tokens_packed'] / max_tokens_per_batch:.1%}"
    if isinstance(policy, FixedBufferPolicy) or read >= gate:  # beyond its gate the tokens of a row decide there too
        return [f"{line}."]
    return [f"{line}; `buffer_policy: fixed` would have read at least {gate}."]


def summarize(counters: Mapping[str, int]) -> str:
    """One line: the counters that are not zero, and the fill."""
    packed, padding = counters["tokens_packed"], counters["tokens_padding"]
    parts = [f"{name.replace('_', ' ')} {value:,}" for name, value in counters.items() if value]
    share = f"; padding {padding / (packed + padding):.2%} of the rows" if packed else ""
    return f"Data: {', '.join(parts) or 'nothing read'}{share}."


def stand_in_line(documents: int) -> str:
    """What validation reads where nothing was given for it."""
    return f"`data.validation_sources` is not set: the loss is that of {counted(documents, 'training document')}."
