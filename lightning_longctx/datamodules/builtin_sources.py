"""Two sources that every machine has, and that differ: Python's own source code, and the prose of installed packages.

They make the quickstart train on real text without a download.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

__all__ = ["BUILTIN_SOURCES"]

# Not the standard library's own code: installed packages, and test data that is broken on purpose.
_NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Descriptions below this many characters are placeholders ("UNKNOWN"), not prose.
_SHORTEST_PROSE = 200


def python_stdlib() -> list[str]:
    """Paths of the standard library's source files, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _NOT_CODE & set(path.relative_to(root).parts))
    return sorted(map(str, files))


def package_metadata() -> list[dict[str, Any]]:
    """The descriptions of the installed distributions, as ``text``, sorted by distribution name."""
    found: dict[str, str] = {}
    for distribution in distributions():
        metadata = distribution.metadata
        text = str(metadata["Description"] or "") if "Description" in metadata else ""
        if len(text) >= _SHORTEST_PROSE and "Name" in metadata:
            found.setdefault(metadata["Name"].lower(), text)
    return [{"text": text, "name": name} for name, text in sorted(found.items())]


#: By name: a function that returns file paths, or records.
BUILTIN_SOURCES: dict[str, Callable[[], Sequence[Any]]] = {
    "package-metadata": package_metadata,
    "python-stdlib": python_stdlib,
}
