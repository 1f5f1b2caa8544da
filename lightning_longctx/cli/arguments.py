"""What the user wrote, before anything is understood: the words, and one tree of all configuration files and flags.

jsonargparse does the real parsing. The tree is read on the side, for three things: to tell
a missing or broken file at once, to know whose classes are configured, and to find the wrong key when parsing fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.spelling import nearest

__all__ = ["Arguments", "read_arguments"]


class _Flag(NamedTuple):
    key: str  # without the leading dashes, as written
    value: Any  # as YAML reads it; the text itself for a configuration file


class Arguments(NamedTuple):
    """The words after the command and what they say together.

    Attributes:
        words: the words as written.
        tree: configuration files and flags merged in order, later ones winning. Class settings given by flag stand
            where a file would have them (``init_args``).
        direct: the sections that had settings without a ``class_path``, at least until a later word named a class.
        files: the configuration files by name; those that are written out on the command line are not here.
    """

    words: list[str]
    tree: dict[str, Any]
    direct: frozenset[str]
    files: tuple[str, ...] = ()


def read_arguments(words: list[str]) -> Arguments:
    """Read all configuration files and flags.

    Args:
        words: what follows the command, such as ``["--config", "run.yaml", "--trainer.max_steps=3"]``.

    Returns:
        The words and their tree.

    Raises:
        ConfigurationError: a configuration file is missing, is not valid YAML, or is not a mapping.
    """
    tree: dict[str, Any] = {}
    direct: set[str] = set()
    files: list[str] = []
    for flag in _flags(words):
        if flag.key in ("config", "c"):
            _merge(tree, _read_config(flag.value))
            files += [] if isinstance(_read_value(flag.value), dict) else [flag.value]
        else:
            _set(tree, flag.key.replace("-", "_").split("."), flag.value)
        direct.update(key for key, value in tree.items() if isinstance(value, dict) and "class_path" not in value)
    return Arguments(list(words), tree, frozenset(direct), tuple(files))


def _flags(words: list[str]) -> Iterator[_Flag]:
    for index, word in enumerate(words):
        if not word.startswith("-") or _is_number(word):
            continue
        key, equals, text = word.partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        if not equals and (not following.startswith("-") or _is_number(following)):
            text = following
        name = key.lstrip("-")
        yield _Flag(name, text if name in ("config", "c") else _read_value(text))


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."


def _read_value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read_config(name: str) -> dict[str, Any]:
    if "://" in name:  # a remote file, which jsonargparse reads
        return {}
    inline = _read_value(name)
    if isinstance(inline, dict):
        return inline
    path = Path(name)
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        fix = f"Did you mean `{path.parent / near}`?" if near else "Check the path."
        raise ConfigurationError("--config", "must be a file that exists", repr(name), fix)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fix = "Correct the line; a mapping needs `key: value` and equal indentation."
        raise ConfigurationError("--config", "must be valid YAML", f"{name}: {_in_one_line(error)}", fix) from None
    except OSError as error:
        fix = "Change its permissions, or give another file."
        raise ConfigurationError("--config", "must be a file that can be read", str(error), fix) from None
    if not isinstance(content, dict):
        got = f"{name} with a {type(content).__name__}"
        raise ConfigurationError(
            "--config", "must be a mapping of sections", got, "Write `trainer:`, `model:`, `data:`."
        )
    return content


def _in_one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"


def _merge(tree: dict[str, Any], other: Mapping[Any, Any]) -> None:
    for key, value in other.items():
        old = tree.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict) and "class_path" not in value:
            _merge(old, value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    key, rest = keys[0].removesuffix("+"), keys[1:]
    old = tree.get(key)
    if not rest:
        tree[key] = _append(old, value) if keys[0].endswith("+") else value
    elif isinstance(old, list) and old:  # `--trainer.callbacks+=NAME --trainer.callbacks.KEY=x`: of the last item
        last = {"item": old[-1]}
        _set(last, ["item", *rest], value)
        tree[key] = [*old[:-1], last["item"]]
    elif rest == ["class_path"]:  # another class starts without the settings of the one before
        tree[key] = {"class_path": value}
    else:
        node = tree[key] = {"class_path": old} if isinstance(old, str) else old if isinstance(old, dict) else {}
        if "class_path" in node and rest[0] not in ("init_args", "dict_kwargs", "help"):
            rest = ["init_args", *rest]
        _set(node, rest, value)


def _append(old: Any, value: Any) -> list[Any]:
    items = old if isinstance(old, list) else [] if old is None else [old]
    return [*items, *(value if isinstance(value, list) else [value])]
