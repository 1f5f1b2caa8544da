"""The commands that are no training run: they are found here, and read the same configuration as ``longctx fit``.

A tool names the parts of a run that it needs; the command line parses and builds them, since tools may not know it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lightning_longctx.cli.arguments import read_arguments

if TYPE_CHECKING:
    from lightning_longctx.cli.parts import Part, PartCLI

__all__ = ["TOOLS", "Configuration", "run_tool"]

#: Name, what ``longctx --help`` says, and the module with ``main(words, read) -> int``.
TOOLS = {
    "check": (
        "do all of a start but train: files, sizes, first row, memory, disk",
        "lightning_longctx.tools.check.command",
    ),
    "init": ("print a recipe to start from", "lightning_longctx.tools.init"),
    "checkpoint": ("list, verify, export and prune checkpoints", "lightning_longctx.tools.checkpoint"),
    "plan": (
        "tell whether a model at a length fits a device: no GPU, no weights",
        "lightning_longctx.tools.plan.command",
    ),
    "probe": ("show how the documents pack: no model, no accelerator", "lightning_longctx.tools.probe.command"),
    "doctor": ("prove that a model trains alike in every layout", "lightning_longctx.tools.doctor.command"),
    "report": ("make one HTML page of a run, or of several", "lightning_longctx.tools.report.command"),
}


class Configuration:
    """The words of the command line as a tool asks for them.

    Args:
        words: configuration files and flags, later ones winning.

    Raises:
        ConfigurationError: a file that is missing or no YAML, before anything is parsed.
    """

    def __init__(self, words: Sequence[str]) -> None:
        read_arguments(list(words))
        from lightning_longctx.cli.parts import PartCLI

        self._parse = partial(PartCLI, list(words))
        self._parsed: PartCLI | None = None
        self._built: dict[str, Any] = {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """All sections as plain containers."""
        return self._cli().settings

    def build(self, part: str) -> Any:
        """Build one part, once."""
        if part not in self._built:
            self._built[part] = self._cli().build(cast("Part", part))
        return self._built[part]

    def _cli(self) -> PartCLI:
        if self._parsed is None:
            self._parsed = self._parse()
        return self._parsed


def run_tool(name: str, words: Sequence[str]) -> int:
    """Run a tool and return its exit code: 0 fine, 1 a finding."""
    module = importlib.import_module(TOOLS[name][1])
    return int(module.main(words, Configuration))
