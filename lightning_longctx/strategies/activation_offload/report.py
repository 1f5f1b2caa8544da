"""What was moved and what it cost: counters, the report after the first step, and why nothing moved if nothing did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.activation_offload.settings import ActivationOffload
from lightning_longctx.units import GIB, MIB

__all__ = ["OffloadCounters", "describe", "refuse_nothing_moved"]

#: Why a saved tensor stays on the device, as a report says it.
REASONS = {
    "weights": "parameters and buffers",
    "small": "smaller than min_tensor_mib",
    "inner": "inside of a block (level boundary)",
    "elsewhere": "not on the computing device",
    "wrapped": "sparse, quantized or wrapped tensors",
    "recomputed": "computed again in backward",
    "no_room": "host memory was full",
    "compiling": "seen by a compiler",
}


@dataclass
class OffloadCounters:
    """Numbers of one rank since it started, all on the host.

    Attributes:
        bytes_out: copied to the host.
        copies_out: in so many copies.
        bytes_in: copied back.
        copies_in: in so many copies.
        duplicate_bytes: not copied because the same bytes were out already.
        stayed: by reason, number and bytes of tensors that did not move.
        calls: of chosen modules with gradients.
        hidden_calls: of those, inside somebody else's checkpoint, whose own hooks hide what is saved.
        largest_small: bytes of the largest tensor that was too small.
        peak_without: largest sum of device memory and host copies seen: an estimate of the peak without offload.
    """

    bytes_out: int = 0
    copies_out: int = 0
    bytes_in: int = 0
    copies_in: int = 0
    duplicate_bytes: int = 0
    stayed: dict[str, list[int]] = field(default_factory=dict)
    calls: int = 0
    hidden_calls: int = 0
    largest_small: int = 0
    peak_without: int = 0

    def stay(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device."""
        entry = self.stayed.setdefault(reason, [0, 0])
        entry[0] += 1
        entry[1] += nbytes
        if reason == "small":
            self.largest_small = max(self.largest_small, nbytes)

    def as_metrics(self, host_peak: int, waited: float) -> dict[str, float]:
        """The keys that a logged step shows, for this rank since the start."""
        return {
            "offload/gib_out": self.bytes_out / GIB,
            "offload/gib_in": self.bytes_in / GIB,
            "offload/copies": float(self.copies_out + self.copies_in),
            "offload/duplicate_gib_avoided": self.duplicate_bytes / GIB,
            "offload/host_peak_gib": host_peak / GIB,
            "offload/wait_s": waited,
        }


def describe(
    counters: OffloadCounters, settings: ActivationOffload, host: tuple[int, int], waited: float, peak: int | None
) -> str:
    """Write the report after the first step.

    Args:
        counters: of this rank.
        settings: of the run.
        host: largest number of bytes in use, and the limit.
        waited: seconds that the computation stood still for copies.
        peak: largest number of bytes allocated on the device so far; None if unknown.
    """
    lines = [
        f"activation offload ({settings.mode}, level {settings.level}), first step, this rank:",
        f"  out {_size(counters.bytes_out)} in {counters.copies_out} copies, in {_size(counters.bytes_in)} in"
        f" {counters.copies_in}; {_size(counters.duplicate_bytes)} of second copies avoided",
        f"  host peak {_size(host[0])} of {_size(host[1])}; computation waited {waited:.3f} s for copies",
    ]
    stayed = [
        f"{REASONS[reason]}: {number} ({_size(nbytes)})" for reason, (number, nbytes) in sorted(counters.stayed.items())
    ]
    if stayed:
        lines.append(f"  stayed: {'; '.join(stayed)}")
    lines.append(f"  {_peak_line(peak, counters.peak_without)}")
    return "\n".join(lines)


def _peak_line(peak: int | None, without: int) -> str:
    if peak is None:
        return "device peak: unknown on this device"
    if peak >= without:
        return (
            f"device peak {_size(peak)} DID NOT FALL: activations and copies never added up to more ({_size(without)}),"
            " so something else sets the peak (loading, one block's own work, logits, the optimizer)"
        )
    return f"device peak {_size(peak)}; at least {_size(without)} without offload (memory plus copies, estimated)"


def refuse_nothing_moved(counters: OffloadCounters, settings: ActivationOffload) -> NoReturn:
    """Refuse an offload that moved nothing in a whole step.

    Raises:
        ConfigurationError: the fix names the cause.
    """
    rule = "must move something, or it only costs"
    cause = _cause(counters, settings)
    raise ConfigurationError("strategy.activation_offload", rule, "0 bytes in the first step", cause)


def _cause(counters: OffloadCounters, settings: ActivationOffload) -> str:
    if counters.calls == 0:
        return "None of the chosen modules ran with gradients: check `modules`, and that they are called."
    if counters.hidden_calls == counters.calls:
        return (
            "The chosen modules run inside of a checkpoint made elsewhere, which hides what they save. Use the"
            " strategy's `activation_checkpointing`, or name the modules around the checkpoint."
        )
    stayed = {reason: entry for reason, entry in counters.stayed.items() if reason != "weights"}
    if "no_room" in stayed:
        return "Not one tensor fits into `host_limit_gib`."
    if settings.device_limit_gib and not stayed:
        return "All of it fits into `device_limit_gib`: leave the offload out, or lower the limit."
    if set(stayed) <= {"small"} and stayed:
        largest = counters.largest_small / MIB
        return f"The largest saved tensor has {largest:.3g} MiB: lower `min_tensor_mib`, or train on longer rows."
    if "inner" in stayed:
        return (
            "Nothing saves the inputs of the chosen modules: add `activation_checkpointing`, which does, or write"
            " `level: all`."
        )
    if settings.keep_last_blocks:
        return f"`keep_last_blocks: {settings.keep_last_blocks}` covers all chosen modules: lower it."
    return "What they save is " + ", ".join(sorted(REASONS[reason] for reason in counters.stayed)) + "."


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.3g} MiB"
