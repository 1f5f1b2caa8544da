"""How docstrings are shown in the reference: an `Example:` is a section there, and a Sphinx role is a plain name."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["Docstrings"]

_ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?(?:[\w.]*\.)?(\w+)`")


class Docstrings(Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            text = re.sub(r"  # doctest: \+\w+", "", text)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)
