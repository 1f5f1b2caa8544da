"""The name that a misspelt one stands for: every "Did you mean" of the suite asks here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["nearest"]

# Similarity (difflib's ratio): that of a slip of the finger ("qickstart": 0.95), and that of another way to name a
# thing ("sp_size" and "sequence_parallel_size": 0.48), which only counts where both share a word. Below, a suggestion
# would only confuse: "foo" and "doctor" have 0.44.
_SLIP = 0.6
_OTHER_WAY = 0.4
_SHORTEST_WORD = 3


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name of ``known`` that is most like ``name``, in upper or lower case, or None if none is like it.

    Example:
        >>> nearest("qickstart", ["pretrain", "quickstart"]), nearest("foo", ["doctor"])
        ('quickstart', None)
    """
    likeness = [(_ratio(name.lower(), item.lower()), item) for item in known]
    found = [(ratio, item) for ratio, item in likeness if ratio >= _least(name, item)]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _ratio(name: str, item: str) -> float:
    return SequenceMatcher(None, item, name).ratio()


def _least(name: str, item: str) -> float:
    return _OTHER_WAY if _words(name) & _words(item) else _SLIP


def _words(name: str) -> set[str]:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return {part.lower() for part in parts if len(part) >= _SHORTEST_WORD}
