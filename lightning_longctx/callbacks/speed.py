"""How fast a run is: tokens and operations per second, from the sums of steps that are read anyway."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_longctx.callbacks.device_peaks import arithmetic_of, peak_tflops
from lightning_longctx.callbacks.flops import ModelFlops
from lightning_longctx.callbacks.step_sums import Field
from lightning_longctx.topology import Topology

__all__ = ["Pace", "Speed", "device_peak"]

_SECONDS_A_DAY = 86_400


class Speed:
    """Turns reduced sums of steps into speeds that are the same number on every rank and in every layout.

    Args:
        topology: over how many devices, and how many of them hold the same row.
        flops: operations of the model; None if unknown.
        peak_tflops: of one device, in 10^12 operations per second; None if unknown.

    Example:
        >>> sums = [0.0] * len(Field)
        >>> sums[Field.TOKENS], sums[Field.SECONDS] = 100.0, 4.0
        >>> Speed(Topology(), None, None).metrics(sums)["train/tokens_per_s"]
        25.0
    """

    def __init__(self, topology: Topology, flops: ModelFlops | None, peak_tflops: float | None) -> None:
        self._devices = topology.world_size
        self._sp_size = topology.sp_size
        self._flops = flops
        self._peak = peak_tflops

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """Speeds by key, as far as they are known.

        Args:
            sums: ``[len(Field)]``, over all ranks and some steps.
        """
        if not sums[Field.TOKENS] or not sums[Field.SECONDS]:
            return {}
        seconds = sums[Field.SECONDS] / self._devices  # the mean of the ranks' clocks, so that it is the same on each
        per_second = sums[Field.TOKENS] / seconds
        metrics = {"train/tokens_per_s": per_second, "train/tokens_per_s_per_device": per_second / self._devices}
        if self._flops is not None:
            operations = self._flops.of(sums[Field.TOKENS], sums[Field.SQUARES] / self._sp_size)
            metrics["train/tflops_per_device"] = operations / seconds / self._devices / 1e12
            if self._peak is not None:
                metrics["train/mfu"] = metrics["train/tflops_per_device"] / self._peak
        return metrics

    def line(self, sums: list[float]) -> str:
        """One sentence for people."""
        found = self.metrics(sums)
        if not found:
            return "Speed: no tokens counted."
        per_second = found["train/tokens_per_s"]
        parts = [f"{per_second:,.0f} tokens/s", f"{_short(per_second * _SECONDS_A_DAY)} tokens a day"]
        if "train/tflops_per_device" in found:
            parts.append(f"{found['train/tflops_per_device']:,.3g} TFLOP/s per device")
        if "train/mfu" in found:
            parts.append(f"{found['train/mfu']:.1%} of its peak")
        return f"Speed: {', '.join(parts)}."


class Pace:
    """The sums of a run's first steps, without the very first ones, which compile and allocate.

    Args:
        skip: steps that are left out. Default 2.
        until: step after which the sums are given out, once. Default 10: soon, and no longer the beginning.
    """

    def __init__(self, skip: int = 2, until: int = 10) -> None:
        self._skip = skip
        self._until = until
        self._steps = 0
        self._sums: Tensor | None = None

    def after(self, step: Tensor) -> list[float] | None:
        """Note a step; the sums after the last one, read on the host, and None at every other.

        Args:
            step: ``[len(Field)]``, over all ranks.
        """
        self._steps += 1
        if not self._skip < self._steps <= self._until:
            return None
        self._sums = step.clone() if self._sums is None else self._sums + step
        return self._sums.tolist() if self._steps == self._until else None


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak of ``device`` at a Trainer's precision in 10^12 operations per second; None where it is not known."""
    arithmetic = arithmetic_of(precision, torch.get_float32_matmul_precision())
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    if name is None or arithmetic is None:
        return None
    return peak_tflops(name(device), arithmetic)


def _short(number: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:,.3g} {suffix}"
    return f"{number:,.0f}"
