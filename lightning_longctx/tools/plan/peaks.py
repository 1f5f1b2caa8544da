"""The peak of each phase of a step; for a model of many equal blocks from two short ones, exactly.

Between one block and the next the same happens, so whatever is alive grows by the same bytes with each block, and the
largest use of a phase is at its first or last blocks. Two depths tell the growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule

from lightning_longctx.strategies.memory import MemorySettings
from lightning_longctx.strategies.shard import find_blocks
from lightning_longctx.tools.plan.shell import block_list
from lightning_longctx.tools.plan.step import Step, Timeline, simulate_step
from lightning_longctx.tools.plan.storages import Segment

__all__ = ["Peaks", "phase_peaks"]

_PHASES = ("forward", "loss", "backward", "optimizer")
# Blocks of the shorter model: the first and the last two differ from those between (prefetch, the end of backward).
_SHORT = 4


@dataclass(frozen=True)
class Peaks:
    """What a step needs.

    Attributes:
        phases: ``forward``, ``loss`` (the head and the cross entropy), ``backward`` and ``optimizer``, each at its
            peak; one device.
        largest: elements and shape of the largest tensor of the step.
    """

    phases: list[Segment]
    largest: tuple[int, tuple[int, ...]]

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        return max(phase.peak for phase in self.phases)

    @property
    def host(self) -> int:
        """Bytes on the host, of this rank."""
        return max(phase.host for phase in self.phases)

    @property
    def binding(self) -> str:
        """The phase that sets the peak."""
        return max(self.phases, key=lambda phase: phase.peak).name


def phase_peaks(template: LightningModule, settings: MemorySettings, step: Step, whole: bool = False) -> Peaks:
    """Simulate a step and return the peak of each phase.

    Args:
        template: the module, on the meta device.
        settings: layout and switches.
        step: the rest.
        whole: run all blocks also where they are alike.

    Raises:
        ConfigurationError: see :func:`~lightning_longctx.tools.plan.step.simulate_step`.
    """
    blocks = find_blocks(template, settings.sharding.blocks)
    checkpointing = settings.activation_checkpointing
    period = checkpointing.n if checkpointing.mode == "every_n" else 1
    short = _SHORT + (len(blocks) - _SHORT) % period
    if whole or len(blocks) <= short + period or block_list(template, blocks) is None:
        found = simulate_step(template, settings, step)
        return Peaks(_phases(found.segments), found.largest)
    one, two = (simulate_step(template, settings, step, depth) for depth in (short, short + period))
    times = (len(blocks) - short) // period
    return Peaks(_phases(_grown(one, two, times)), two.largest)


def _grown(one: Timeline, two: Timeline, times: int) -> list[Segment]:
    """The segments of the first timeline as they would be with ``times`` more of the blocks that the second has more.

    What lies between is on the straight line between its ends, so its peak is at one of them.
    """
    grown = []
    for first, second in _aligned(one.segments, two.segments):
        names = first.parts.keys() | second.parts.keys()
        parts = {name: _line(first.parts.get(name, 0), second.parts.get(name, 0), times) for name in names}
        peak, host = _line(first.peak, second.peak, times), _line(first.host, second.host, times)
        grown.append(Segment(first.name, peak, parts, host))
    return grown


def _aligned(one: Sequence[Segment], two: Sequence[Segment]) -> list[tuple[Segment, Segment]]:
    pairs: list[tuple[Segment, Segment]] = []
    for phase in _PHASES:
        first, second = ([segment for segment in line if _phase_of(segment) == phase] for line in (one, two))
        half = (len(first) + 1) // 2
        rest = len(first) - half
        pairs += zip(first[:half], second[:half], strict=True)
        pairs += zip(first[half:], second[len(second) - rest :], strict=True)
    return pairs


def _phases(segments: Sequence[Segment]) -> list[Segment]:
    found = []
    for phase in _PHASES:
        members = [segment for segment in segments if _phase_of(segment) == phase]
        if members:
            largest = max(members, key=lambda segment: segment.peak)
            found.append(Segment(phase, largest.peak, largest.parts, max(segment.host for segment in members)))
    return found


def _phase_of(segment: Segment) -> str:
    return segment.name.partition(" ")[0]


def _line(first: int, second: int, times: int) -> int:
    return first + (second - first) * times
