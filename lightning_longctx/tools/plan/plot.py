"""The variants of a plan as stacked bars: what the device holds at the peak of each, against what it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.plan.report import Variant
from lightning_longctx.tools.plan.search import with_margin
from lightning_longctx.tools.plan.storages import CATEGORIES
from lightning_longctx.units import GIB

__all__ = ["check_plot", "save_plot"]

# Told apart also by those who see few colours (the palette of Okabe and Ito).
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#E69F00")


def check_plot(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is simulated.

    Raises:
        ConfigurationError: the name does not end like one of a picture.
    """
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ConfigurationError("--plot", "must name a .png, .pdf or .svg file", repr(str(path)), "Rename it.")


def save_plot(path: Path, variants: Sequence[Variant], device_gib: float) -> None:
    """Draw and write the picture. No window and no global state of matplotlib is used.

    Args:
        path: file; its folder exists.
        variants: from top to bottom.
        device_gib: memory of a device.
    """
    from matplotlib.figure import Figure  # here, since it takes a second to import

    figure = Figure(figsize=(10, 1.6 + 0.5 * len(variants)), layout="constrained")
    axes = figure.subplots()
    peaks = [max(variant.peaks.phases, key=lambda phase: phase.peak) for variant in variants]
    places, starts = list(range(len(variants))), [0.0] * len(variants)
    for name, colour in zip(CATEGORIES, _COLOURS, strict=True):
        widths = [phase.parts.get(name, 0) / GIB for phase in peaks]
        axes.barh(places, widths, left=starts, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    margins = [with_margin(phase.peak) / GIB - phase.peak / GIB for phase in peaks]
    axes.barh(places, margins, left=starts, color="none", edgecolor="#888888", hatch="//", label="margin")
    axes.axvline(device_gib, color="black", linestyle="--")
    axes.set_yticks(places, [variant.name for variant in variants])
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one device at the peak of the step; the line is what it has")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)
