"""Writes the figures of the documentation: ``python docs/figures/make.py``.

A test fails where a figure is not what its script draws.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
IMAGES = HERE.parent / "images"
FIGURES = ("exact_loss", "overview", "packing", "two_slots", "ulysses")


def figure(name: str) -> str:
    """Return a figure as SVG."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    text: str = importlib.import_module(name).draw()
    return text


if __name__ == "__main__":
    for each in FIGURES:
        (IMAGES / f"{each}.svg").write_text(figure(each), encoding="utf-8")
