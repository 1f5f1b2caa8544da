"""Which settings a place of the configuration may have, read from constructors and their type hints.

It serves suggestions and the two spellings of flags; jsonargparse alone decides what is valid. So where a hint cannot
be read, the answer is "anything", never a complaint.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = [
    "Place",
    "base_classes",
    "class_names",
    "constructor_settings",
    "find_class",
    "item_places",
    "settings_at",
    "spell_flag",
]

SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")


class Place(NamedTuple):
    """A place of the configuration.

    Attributes:
        hint: the type that it takes; Any if unknown.
        default: the class whose settings may stand here without a ``class_path``.
    """

    hint: Any = Any
    default: type | None = None


def constructor_settings(cls: type) -> tuple[dict[str, Place], bool]:
    """Return the settings of a class: its constructor's parameters, and those that ``**kwargs`` passes to its parents.

    Returns:
        Name and place of each setting, and whether there may be more (``**kwargs`` that leads nowhere).
    """
    settings: dict[str, Place] = {}
    for owner in inspect.getmro(cls):
        constructor = vars(owner).get("__init__")
        if constructor is None or owner is object:
            continue
        hints = _hints(constructor)
        passes_on = False
        for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:
                passes_on = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                settings.setdefault(name, Place(hints.get(name, Any)))
        if not passes_on:
            return settings, False
    return settings, bool(settings)


def settings_at(place: Place, value: Any = None) -> tuple[str, dict[str, Place]] | None:
    """Return whose settings a mapping at this place holds, and which there are; None if any key is allowed.

    Args:
        place: the place.
        value: the mapping that stands there, as far as it is known: it may name a class.
    """
    cls = None
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        cls = find_class(place, value["class_path"])
        if cls is None:
            return None
    for candidate in (cls, place.default, *_arms(place.hint)):
        if isinstance(candidate, type) and (candidate in (cls, place.default) or dataclasses.is_dataclass(candidate)):
            settings, more = constructor_settings(candidate)
            return None if more else (candidate.__name__, settings)
    return None


def item_places(place: Place) -> tuple[Place | None, Place | None]:
    """Return the places of a list's items and of a free mapping's values; None where the hint has neither."""
    items = values = None
    for arm in _arms(place.hint):
        origin, arguments = typing.get_origin(arm), typing.get_args(arm)
        if not isinstance(origin, type) or not arguments:
            continue
        if issubclass(origin, Mapping):
            values = Place(arguments[-1])
        elif issubclass(origin, Iterable) and origin is not tuple:
            items = Place(arguments[0])
    return items, values


def base_classes(place: Place) -> list[type]:
    """Return the classes that this place takes by name: those that are neither data nor containers."""
    return [arm for arm in _arms(place.hint) if isinstance(arm, type) and _is_component(arm)]


def find_class(place: Place, name: str) -> type | None:
    """Return the class of a bare name or an import path, or None if there is none."""
    if "." not in name:
        return class_names(place).get(name)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def class_names(place: Place) -> dict[str, type]:
    """Return the imported classes that fit here, by bare name."""
    names: dict[str, type] = {}
    for base in base_classes(place):
        for cls in _subclasses(base):
            if not cls.__name__.startswith("_") and not inspect.isabstract(cls):
                names.setdefault(cls.__name__, cls)
    return names


def spell_flag(word: str, tree: Mapping[str, Any], places: Mapping[str, Place]) -> str:
    """Return a word of the command line with dashes in its keys as underscores; names that the user chose stay.

    Args:
        word: such as ``--data.max-seq-len=512K``. A word that is no long flag is returned unchanged.
        tree: all that was given, which tells whose settings a key belongs to.
        places: the sections.
    """
    if not word.startswith("--") or word == "--":
        return word
    key, equals, value = word[2:].partition("=")
    known: Mapping[str, Place] | None = places
    values: Place | None = None
    node: Any = tree
    parts: list[str] = []
    for part in key.split("."):
        bare = part.removesuffix("+")
        chosen_by_user = known is None and values is not None and values.hint is not Any
        name = bare if chosen_by_user or (known and bare in known) else bare.replace("-", "_")
        parts.append(name + part[len(bare) :])
        node = _child(node, name)
        if name in SPEC_KEYS:
            continue
        place = (values if known is None else known.get(name)) or Place()
        found = settings_at(place, node)
        known, values = (found[1] if found else None), item_places(place)[1]
    return f"--{'.'.join(parts)}{equals}{value}"


def _child(node: Any, name: str) -> Any:
    child = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(child, list) and child:  # flags set the last item
        child = child[-1]
    return {"class_path": child} if isinstance(child, str) else child


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    function = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:  # one by one, since one that is imported for type checkers only would hide all others
            hints.update(typing.get_type_hints(alone, globalns=function.__globals__))
        except (NameError, TypeError, AttributeError, SyntaxError):
            continue
    return hints


def _arms(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for arm in typing.get_args(hint):
            yield from _arms(arm)
    elif typing.get_origin(hint) is typing.Annotated:
        yield from _arms(typing.get_args(hint)[0])
    else:
        yield hint


def _is_component(cls: type) -> bool:
    plain = (str, bytes, int, float, bool, type(None), list, dict, tuple, set)
    return cls.__module__ not in ("builtins", "typing", "collections.abc", "datetime", "pathlib") and not (
        issubclass(cls, plain) or dataclasses.is_dataclass(cls)
    )


def _subclasses(base: type) -> Iterator[type]:
    yield base
    children: list[type] = base.__subclasses__()
    for cls in children:
        yield from _subclasses(cls)
