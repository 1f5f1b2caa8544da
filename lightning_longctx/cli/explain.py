"""One line for a configuration that jsonargparse refused: the wrong key or class with the nearest right one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import lightning_longctx
from lightning_longctx.cli.errors import CommandLineError
from lightning_longctx.cli.schema import (
    SPEC_KEYS,
    Place,
    base_classes,
    class_names,
    constructor_settings,
    find_class,
    item_places,
    settings_at,
)
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.spelling import nearest

__all__ = ["explain"]

# Lines of jsonargparse that repeat the structure of a type and say nothing about the mistake.
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>|Expected a path but"
    r"|Problem with given class_path|Parser key|$"
)
_TYPE_ONLY = re.compile(r"Expected an? <class '([\w.]+)'>$")
_CHOICES = re.compile(r"Expected a typing\.Literal\[(.*)\]")
# So many characters of a wrong value say which one it is.
_LONGEST_VALUE = 80
_TYPE_AND_VALUE = re.compile(r"Expected an? <class '([\w.]+)'>\. Got value: (.*)")


def explain(
    message: str, tree: Mapping[str, Any], places: Mapping[str, Place], command: str
) -> ConfigurationError | CommandLineError:
    """Return the error to show for a refused configuration.

    Args:
        message: jsonargparse's message, often of many lines.
        tree: what the user wrote, merged.
        places: the sections and other top-level keys.
        command: ``fit`` or another, for the hint where all settings are listed.

    Returns:
        The first wrong key or class name of the tree, with the nearest right one; else the message in one line.
    """
    for error in _section_problems(tree, places, command):
        return error
    text = _condense(message, tree)
    if (forgotten := re.fullmatch(r"unrecognized arguments: (\S+\.ya?ml)", text)) is not None:
        text += f". Did you mean `longctx {command} --config {forgotten[1]}`?"
    return CommandLineError(text)


def _section_problems(
    tree: Mapping[str, Any], places: Mapping[str, Place], command: str
) -> Iterator[ConfigurationError]:
    for key, value in tree.items():
        if key in places:
            yield from _problems(places[key], value, key, places)
        elif key not in ("help", "h", "print_config"):
            yield _unknown_key("", key, f"`longctx {command}`", places, places)


def _problems(place: Place, value: Any, path: str, places: Mapping[str, Place]) -> Iterator[ConfigurationError]:
    items, values = item_places(place)
    if isinstance(value, str) and str not in getattr(place.hint, "__args__", (place.hint,)):
        yield from _name_problems(place, value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(items or Place(), item, f"{path}[{index}]", places)
    elif isinstance(value, Mapping):
        yield from _mapping_problems(place, values, value, path, places)


def _mapping_problems(
    place: Place, values: Place | None, value: Mapping[str, Any], path: str, places: Mapping[str, Place]
) -> Iterator[ConfigurationError]:
    name = value.get("class_path")
    if isinstance(name, str):
        yield from _name_problems(place, name, path)
    elif place.default is None and base_classes(place) and values is None:
        fix = f"Write `{path}: {{class_path: ..., init_args: {{...}}}}`."
        yield ConfigurationError(path, "must name a class", f"the keys {sorted(value)}", fix)
        return
    known = settings_at(place, value)
    for key, item in _flat(value).items():
        if known is None:
            yield from _problems(values or Place(), item, f"{path}.{key}", places)
        elif key in known[1]:
            yield from _problems(known[1][key], item, f"{path}.{key}", places)
        elif key != "help":
            yield _unknown_key(f"{path}.", key, known[0], known[1], places)


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Join ``init_args`` with settings given beside it: flags and files may use either form."""
    joined = {key: item for key, item in value.items() if key not in SPEC_KEYS}
    arguments = value.get("init_args")
    return {**joined, **arguments} if isinstance(arguments, Mapping) else joined


def _name_problems(place: Place, name: str, path: str) -> Iterator[ConfigurationError]:
    bases = base_classes(place)
    if not bases or find_class(place, name) is not None:
        return
    rule = f"must name a {bases[0].__name__}"
    if "." in name:
        fix = "Check the spelling, and that its package is installed or in this folder."
        yield ConfigurationError(path, rule, f"{name!r}, which cannot be imported", fix)
        return
    known = class_names(place)
    near = nearest(name, known)
    fix = f"Did you mean `{near}`?" if near else "Give the import path of the class, such as `my_package.MyClass`."
    ours = [plug_in for plug_in in lightning_longctx.__all__ if plug_in in known]
    fix += f" This package has: {', '.join(ours)}." if ours and not near else ""
    yield ConfigurationError(path, rule, repr(name), fix)


def _unknown_key(
    prefix: str, key: str, owner: str, known: Mapping[str, Place], places: Mapping[str, Place]
) -> ConfigurationError:
    near = next((f"{section}.{key}" for section in places if key in _section_settings(places[section])), None)
    near = near or next((f"{prefix}{group}.{key}" for group in known if key in _group_settings(known[group])), None)
    if near is None:
        best = nearest(str(key), known)
        near = f"{prefix}{best}" if best else None
    fix = f"Did you mean `{near}`?" if near else f"It has: {', '.join(sorted(known))}."
    return ConfigurationError(f"{prefix}{key}", f"must be a setting of {owner}", "an unknown key", fix)


def _section_settings(place: Place) -> dict[str, Place]:
    return constructor_settings(place.default)[0] if place.default is not None else {}


def _group_settings(place: Place) -> dict[str, Place]:
    found = settings_at(place)
    return found[1] if found else {}


def _condense(message: str, tree: Mapping[str, Any]) -> str:
    keys = re.findall(r'Parser key "([^"]+)"', message)
    path = ".".join(key for index, key in enumerate(keys) if index == 0 or key != keys[index - 1].rpartition(".")[2])
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    kept = list(dict.fromkeys(line for line in lines if not _NOISE.match(line)))
    # Of the arms of a Union, those that say only what type they want are dropped where another arm says more.
    telling = [line for line in kept if not _TYPE_ONLY.match(line) and not _CHOICES.match(line)]
    typed = _value_at(tree, path)
    text = "; ".join(telling) or _expected(kept) + (f", but got {typed!r}" if isinstance(typed, str) else "")
    text = _TYPE_AND_VALUE.sub(lambda found: _of_type(found, typed), text)
    text = text.replace("Not of type TokenCount: `tokens` ", "")
    missing = re.search(r"following arguments are required: ([\w., ]+)", text)
    if missing:
        names = ", ".join(f"`{path}.{name.strip()}`" if path else f"`{name.strip()}`" for name in missing[1].split(","))
        return f"{names} must be given. Add it to the file of `--config`; `longctx init` has files to start from."
    return f"`{path}` {text}" if path else text


def _expected(lines: list[str]) -> str:
    choices = [choice for line in lines for found in [_CHOICES.match(line)] if found for choice in found[1].split(", ")]
    if choices:
        return f"must be one of {', '.join(choices)}"
    return f"must be of type {' or '.join(_TYPE_ONLY.sub(_short_name, line) for line in lines)}"


def _value_at(tree: Mapping[str, Any], path: str) -> Any:
    """What the user wrote under a key, None if it is not found."""
    value: Any = tree
    for key in path.split("."):
        value = _flat(value).get(key) if isinstance(value, Mapping) else None
    return value


def _of_type(found: re.Match[str], typed: Any) -> str:
    """Type and value. Where a path was written, jsonargparse's value is the text of the file, which nobody wrote."""
    value = typed if isinstance(typed, str) else found[2]
    value = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."
    return f"must be of type {_short_name(found)}, but got {value}"


def _short_name(found: re.Match[str]) -> str:
    return found[1].rpartition(".")[2]
