"""Numbers as people read them, and places on an axis."""

from __future__ import annotations

import math

__all__ = ["decades", "duration", "pleasant_ticks", "short", "whole"]


def short(value: float) -> str:
    """Four digits, with separators, and M or G (10^6, 10^9) for large ones.

    Example:
        >>> short(3.41832), short(238791.0), short(2.5e8), short(0.0003), short(0.000000123)
        ('3.418', '238,791', '250 M', '0.0003', '1.23e-07')
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if 0.99995 * limit <= size < limit * 1e6:
            return f"{value / limit:.4g} {unit}"
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def whole(value: float) -> str:
    """A count with separators."""
    return f"{value:,.0f}" if math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    """A time.

    Example:
        >>> duration(3.5e-5), duration(0.0123), duration(97), duration(4000), duration(2e5)
        ('0.035 ms', '0.012 s', '1 min 37 s', '1 h 6 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < seconds < 1e-3:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{seconds:.2g} s"
    total = round(seconds)
    for big, small, length, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60)):
        if total >= length:
            return f"{total // length} {big} {total % length // part} {small}"
    return f"{total // 60} min {total % 60} s"


def pleasant_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` of them (1, 2 or 5 times a power of ten apart)."""
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten between two positive numbers, thinned out to at most six; in less than two decades 2 and 5 too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, -(-(last - first) // 6))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    found = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
