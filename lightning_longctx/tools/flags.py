"""What the flags of all tools share: one parser that knows its own flags and leaves the configuration's alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning_longctx.errors import ConfigurationError

__all__ = ["FlagParser", "RaisingParser", "gib", "integer", "number"]


class RaisingParser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the error with its flag as the field, if it is one of ours, and else with what argparse says."""
        field, _, text = message.removeprefix("argument ").partition(": ")
        rule, _, got = text.partition(" but got ")
        fix = f"See `{self.prog} -h`."
        if not got:
            raise ConfigurationError(self.prog, "must be called as its help says", message, fix)
        raise ConfigurationError(field.split("/")[0], rule, got, fix)


class FlagParser(RaisingParser):
    """The flags of one tool.

    Args:
        tool: its name on the command line.
        description: one sentence.
        required: what the usage line shows after ``--config FILE``.
        usage: the whole line after the tool's name, for a tool without a configuration.
    """

    def __init__(self, tool: str, description: str, required: str = "", usage: str = "") -> None:
        usage = f"longctx {tool} {usage or f'--config FILE {required}[--SECTION.KEY VALUE ...] [options]'}"
        super().__init__(prog=f"longctx {tool}", usage=usage, description=description, allow_abbrev=False)

    def add(self, name: str, **settings: Any) -> None:
        """Add ``--name``, with dashes and with underscores."""
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        self.add_argument(*spellings, **settings)

    def split(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Split words into the tool's own values, by name, and the words of the configuration.

        Raises:
            ConfigurationError: a value that cannot be, or a misspelt flag.
        """
        found, rest = self.parse_known_args(list(words))
        for word in rest:
            near = self._nearest(word, vars(found))
            if near:
                raise self._unknown(word, near)
        return vars(found), rest

    def read_all(self, words: Sequence[str]) -> dict[str, Any]:
        """Read words that are all the tool's own, by name; paths may stand between flags.

        Raises:
            ConfigurationError: a value that cannot be, or an unknown flag.
        """
        found, rest = self.parse_known_intermixed_args(list(words))
        if rest:
            raise self._unknown(rest[0], self._nearest(rest[0], vars(found)))
        return vars(found)

    def _nearest(self, word: str, names: Iterable[str]) -> list[str]:
        known, flag = [f"--{name.replace('_', '-')}" for name in names], word.partition("=")[0]
        return get_close_matches(flag, known, n=1, cutoff=0.75) if flag.startswith("--") and "." not in flag else []

    def _unknown(self, word: str, near: list[str]) -> ConfigurationError:
        fix = f"Did you mean {near[0]}?" if near else f"See `{self.prog} -h`."
        return ConfigurationError(word.partition("=")[0], f"must be a flag of {self.prog}", "an unknown one", fix)


def integer(least: int) -> Callable[[str], int]:
    """A type for flags: an integer of at least ``least``; underscores between digits are read over."""

    def read(text: str) -> int:
        digits = text.replace("_", "")
        if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least} but got {text!r}")
        return int(digits)

    return read


def number(what: str, low: float, high: float) -> Callable[[str], float]:
    """A type for flags: a number above one and up to another.

    Args:
        what: ends the rule: "must be ...".
        low: what it must be above.
        high: the largest.
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        if not low < value <= high:
            raise argparse.ArgumentTypeError(f"must be {what} but got {text!r}")
        return value

    return read


gib = number("a number of GiB such as 80", 0, 2**20)
