"""Four short texts for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _texts() -> None:
    Path("texts").mkdir()
    for number in range(4):
        Path(f"texts/{number}.txt").write_text(f"document {number}: {'words ' * number}")
