"""One part of a run from its configuration: the way in for the commands that are no training run.

A tool that measures packing needs the data module alone, and must read the same file in the same way as ``longctx
fit``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from lightning_longctx.cli.app import LongContextCLI
from lightning_longctx.errors import ConfigurationError

__all__ = ["Part", "build_from_config", "load_config", "read_words"]

Part = Literal["data", "model", "strategy", "trainer"]

# Where each part stands in the configuration.
_PLACES = {"data": "data", "model": "model", "strategy": "trainer", "trainer": "trainer"}


def build_from_config(
    config: str | PathLike[str] | Mapping[str, Any], part: Part, overrides: Mapping[str, Any] | None = None
) -> Any:
    """Parse a configuration and build one part of it; the other parts are parsed and checked, not built.

    Args:
        config: path of a YAML file, or its content as a mapping.
        part: ``data``, ``model``, ``strategy`` (an object, or the registered name) or ``trainer`` (with its callbacks,
            loggers and strategy).
        overrides: dotted keys and their values, such as ``{"data.max_seq_len": "8K"}``: what flags are to ``longctx``.

    Returns:
        The part. Random number generators are seeded as the configuration says.

    Raises:
        ConfigurationError: a wrong key, value or class, as ``longctx fit`` tells it.
        CommandLineError: any other refusal, in one line.

    Example:
        >>> data = build_from_config("examples/quickstart.yaml", "data", {"data.max_seq_len": "8K"})  # doctest: +SKIP
    """
    if part not in _PLACES:
        fix = f"Give one of {', '.join(_PLACES)}."
        raise ConfigurationError("part", "must be a part of a configuration", repr(part), fix)
    return _PartCLI(_words(config, overrides), part).built


def load_config(
    config: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Parse a configuration and return all of its settings, defaults included, as plain containers. Nothing is built.

    Args:
        config: path of a YAML file, or its content as a mapping.
        overrides: dotted keys and their values.

    Returns:
        The sections ``trainer``, ``model`` and ``data`` with full class paths, and the other top-level keys.

    Raises:
        ConfigurationError: a wrong key, value or class, as ``longctx fit`` tells it.
        CommandLineError: any other refusal, in one line.
    """
    cli = _PartCLI(_words(config, overrides), None)
    cli._dump_config()
    dump: dict[str, Any] = cli.config_dump
    return dump


def read_words(words: list[str], part: Part) -> tuple[Any, dict[str, Any]]:
    """Build one part from the words of a command line, as :func:`build_from_config` does.

    Returns:
        The part, and all sections as plain containers. Class settings stand under ``init_args``.
    """
    cli = _PartCLI(words, part)
    settings: dict[str, Any] = cli.config[cli.subcommand].as_dict()
    return cli.built, settings


class _PartCLI(LongContextCLI):
    """Parses as ``longctx fit`` does, so that every key of a run is allowed, and builds at most one part."""

    def __init__(self, words: list[str], part: Part | None) -> None:
        self._part = part
        self.built: Any = None
        super().__init__(["fit", *words])

    def instantiate_classes(self) -> None:
        if self._part is None:
            return
        section = _PLACES[self._part]
        config = self.config[self.subcommand]
        container = type(config)
        wanted = container({section: config.get(section)})
        if self._part == "strategy":
            wanted = container({section: container(strategy=config[section].strategy)})
        with self._told_in_one_line():
            self.config_init = self._parser(self.subcommand).instantiate(wanted)
            self.built = self._pick()

    def _pick(self) -> Any:
        assert self._part is not None
        section = self.config_init.get(_PLACES[self._part])
        if self._part == "trainer":
            return self.instantiate_trainer()
        return section.strategy if self._part == "strategy" else section

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the part is what was asked for."""


def _words(config: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None) -> list[str]:
    content = json.dumps(dict(config)) if isinstance(config, Mapping) else str(config)
    flags = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in (overrides or {}).items()
    ]
    return [f"--config={content}", *flags]
