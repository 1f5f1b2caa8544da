"""One part of a run from its configuration: the way in for the commands that are no training run.

A tool that measures packing needs the data module alone, and must read the same file in the same way as ``longctx
fit``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal

from lightning.fabric.utilities.seed import seed_everything

from lightning_longctx.cli.app import LongContextCLI
from lightning_longctx.errors import ConfigurationError

__all__ = ["Part", "PartCLI", "build_from_config", "load_config", "read_words"]

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
    return PartCLI(_words(config, overrides)).build(part)


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
    cli = PartCLI(_words(config, overrides))
    cli._dump_config()
    dump: dict[str, Any] = cli.config_dump
    return dump


def read_words(words: list[str], part: Part) -> tuple[Any, dict[str, Any]]:
    """Build one part from the words of a command line, as :func:`build_from_config` does.

    Returns:
        The part, and all sections as plain containers. Class settings stand under ``init_args``.
    """
    cli = PartCLI(words)
    return cli.build(part), cli.settings


class PartCLI(LongContextCLI):
    """Parses as ``longctx fit`` does, so that every key of a run is allowed, and builds the parts that are asked for.

    Args:
        words: configuration files and flags.
    """

    def __init__(self, words: list[str]) -> None:
        super().__init__(["fit", *words])

    @property
    def settings(self) -> dict[str, Any]:
        """All sections as plain containers. Class settings stand under ``init_args``."""
        settings: dict[str, Any] = self.config[self.subcommand].as_dict()
        return settings

    def build(self, part: Part) -> Any:
        """Build one part, with random numbers as at the start of a run."""
        config = self.config[self.subcommand]
        section, container = _PLACES[part], type(config)
        wanted = container({section: config.get(section)})
        if part == "strategy":
            wanted = container({section: container(strategy=config[section].strategy)})
        seed = config.get("seed_everything")
        if isinstance(seed, int) and not isinstance(seed, bool):  # parsing has drawn one, and said so
            seed_everything(seed, workers=True, verbose=False)
        with self._told_in_one_line():
            self.config_init = self._parser(self.subcommand).instantiate(wanted)
            if part == "trainer":
                return self.instantiate_trainer()
            built = self.config_init.get(section)
            return built.strategy if part == "strategy" else built

    def instantiate_classes(self) -> None:
        """Build nothing yet."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: the parts are what was asked for."""


def _words(config: str | PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any] | None) -> list[str]:
    content = json.dumps(dict(config)) if isinstance(config, Mapping) else str(config)
    flags = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in (overrides or {}).items()
    ]
    return [f"--config={content}", *flags]
