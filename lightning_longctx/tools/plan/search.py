"""What fits: the longest row under given switches, and the fewest switches for a given row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from lightning_longctx.strategies.memory import MemorySettings, Switch, next_switches
from lightning_longctx.tools.plan.peaks import Peaks, phase_peaks
from lightning_longctx.tools.plan.reading import Run
from lightning_longctx.units import GIB

__all__ = [
    "MARGIN_BYTES",
    "MARGIN_SHARE",
    "Planner",
    "all_changes",
    "combine",
    "last_of_each",
    "nested",
    "with_margin",
]

#: What the allocator loses to rounding and fragmentation, as a part of the peak. A judgement, not a measurement: more
#: may be lost without PyTorch's expandable segments.
MARGIN_SHARE = 0.05
#: What is on a device beside PyTorch's tensors: the CUDA context (about 0.5 GiB), NCCL's buffers (about 1 GiB with
#: several groups), workspaces of matrix products.
MARGIN_BYTES = 2 * GIB

# Lengths are found to within this part, and are multiples of so many tokens a rank.
_PRECISION = 1 / 64
_GRAIN = 256
_TRIES = 24
_PAIRS = 2  # switches: so many together are tried without asking which are needed
_LONGEST = 2**31 - 1  # document bounds are int32


def with_margin(peak: int) -> int:
    """What a device must have for a simulated peak, in bytes."""
    return int(peak * (1 + MARGIN_SHARE)) + MARGIN_BYTES


class Planner:
    """Simulates variants of a run, each once.

    Args:
        run: the configured one.
        device_bytes: memory of a device.
        host_bytes: memory of a node; None if it is not judged.
        watch: called after each simulation, of which a search makes dozens; None for nobody.
    """

    def __init__(
        self, run: Run, device_bytes: int, host_bytes: int | None = None, watch: Callable[[], object] | None = None
    ) -> None:
        self.run = run
        self._watch = watch
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self._known: dict[tuple[str, int], Peaks] = {}

    def peaks(self, settings: MemorySettings, tokens: int | None = None) -> Peaks:
        """What a step needs with these settings.

        Args:
            settings: layout and switches.
            tokens: of a row; None for the configured ones, rounded up to what the ranks can share.
        """
        size = settings.sequence_parallel_size
        length = -(-(tokens or self.run.step.tokens) // size) * size
        key = (repr(settings), length)
        if key not in self._known:
            step = replace(self.run.step, tokens=length)
            self._known[key] = phase_peaks(self.run.template, settings, step)
            if self._watch is not None:
                self._watch()
        return self._known[key]

    def shortage(self, peaks: Peaks) -> int:
        """Bytes that are missing, on the device or on the host; 0 or less if it fits."""
        missing = with_margin(peaks.peak) - self.device_bytes
        if self.host_bytes is not None:
            missing = max(missing, peaks.host * self.run.ranks_per_node - self.host_bytes)
        return missing

    def fits(self, settings: MemorySettings, tokens: int | None = None) -> bool:
        """Whether a row fits."""
        return self.shortage(self.peaks(settings, tokens)) <= 0

    def longest(self, settings: MemorySettings) -> int:
        """Tokens of the longest row that fits, to within 2 %; 0 if none does.

        Bisection between a length that fits and one that does not. Since memory grows in straight pieces, the line
        through the last two lengths says where to cut; where that does not help, the middle is taken.
        """
        grain = _GRAIN * settings.sequence_parallel_size
        low, high = (0, -self.device_bytes), (_LONGEST // grain * grain, 0)
        seen: list[tuple[int, int]] = []  # lengths and what was missing
        guess = max(self.run.step.tokens // grain * grain, grain)
        while len(seen) < _TRIES:
            shortage = self.shortage(self.peaks(settings, guess))
            seen.append((guess, shortage))
            low, high = ((guess, shortage), high) if shortage <= 0 else (low, (guess, shortage))
            close = -self.device_bytes * _PRECISION <= shortage <= 0
            if close or high[0] - low[0] <= max(grain, low[0] * _PRECISION):
                break
            cut = _next_length(seen, low, high)
            guess = min(max(int(cut) // grain * grain, low[0] + grain), high[0] - grain)
        return low[0]

    def smallest_fit(self, settings: MemorySettings) -> list[Switch] | None:
        """The fewest switches that make the configured row fit, the cheaper ones first; None if all together do not.

        Pairs mostly do. Beyond them, what does not fit without a switch, whatever else is on, needs it. And where the
        largest of its alternatives is not enough, the smaller ones are not tried.
        """
        if self.fits(settings):
            return []
        switches = next_switches(settings)
        kinds, everything = _by_key(switches), last_of_each(switches)
        if not kinds or not self.fits(combine(settings, everything)):
            return None
        every = range(len(kinds))
        needed: set[int] = set()
        for size in range(1, len(kinds) + 1):
            if size == _PAIRS + 1:
                needed = {place for place in every if self._needs(settings, everything, place)}
            for places in combinations(every, size):
                found = self._cheapest(settings, [kinds[place] for place in places]) if needed <= {*places} else None
                if found is not None:
                    return found
        return everything

    def _needs(self, settings: MemorySettings, everything: Sequence[Switch], place: int) -> bool:
        others = [switch for number, switch in enumerate(everything) if number != place]
        return not self.fits(combine(settings, others))

    def _cheapest(self, settings: MemorySettings, kinds: Sequence[Sequence[Switch]]) -> list[Switch] | None:
        """The first fitting choice of one switch of each kind; None if the last of each together do not fit."""
        if not self.fits(combine(settings, [choices[-1] for choices in kinds])):
            return None
        return next(list(chosen) for chosen in product(*kinds) if self.fits(combine(settings, chosen)))


def _next_length(seen: Sequence[tuple[int, int]], low: tuple[int, int], high: tuple[int, int]) -> float:
    """Where to look next: on the line through two lengths, or between the ends."""
    if len(seen) == 1:
        return seen[0][0] * 2 if seen[0] == low else seen[0][0] / 2
    (first, missing), (second, more) = sorted(seen[-2:] if high[1] <= 0 or low[0] == 0 else [low, high])
    if more <= missing or len(seen) % 4 == 0:
        return (low[0] + high[0]) / 2 if high[1] > 0 else second * 4
    # A little short of the crossing, so that the next length is one that fits, closely.
    return (first - missing * (second - first) / (more - missing)) * (1 - _PRECISION / 4)


def combine(settings: MemorySettings, switches: Sequence[Switch]) -> MemorySettings:
    """Make the changes of several switches together."""
    for switch in switches:
        found = [other for other in next_switches(settings) if other.changes == switch.changes]
        settings = found[0].settings
    return settings


def last_of_each(switches: Sequence[Switch]) -> list[Switch]:
    """Of alternatives of one setting the last, which saves most."""
    return [choices[-1] for choices in _by_key(switches)]


def all_changes(switches: Sequence[Switch]) -> dict[str, Any]:
    """Values by dotted key."""
    changes: dict[str, Any] = {}
    for switch in switches:
        changes.update(switch.changes)
    return changes


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings inside one another.

    Example:
        >>> nested({"a.b": 1, "a.c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _by_key(switches: Sequence[Switch]) -> list[list[Switch]]:
    """Switches that change the same setting together, as alternatives."""
    kinds: dict[tuple[str, ...], list[Switch]] = {}
    for switch in switches:
        kinds.setdefault(tuple(switch.changes), []).append(switch)
    return list(kinds.values())
