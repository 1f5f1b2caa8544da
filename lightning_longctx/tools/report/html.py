"""HTML that cannot be broken by what is in it: text is escaped unless it was made here."""

from __future__ import annotations

from html import escape

__all__ = ["Markup", "join", "tag"]

_VOID = {"input", "br", "meta"}


class Markup(str):
    """HTML, not text."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element.

    Args:
        name: of the element.
        children: text, which is escaped, or :class:`Markup`; None is left out.
        attributes: ``class_`` is ``class``, ``data_x`` is ``data-x``; None and False are left out, True has no value.

    Example:
        >>> tag("p", "1 < 2", class_="a")
        '<p class="a">1 &lt; 2</p>'
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelt = key.rstrip("_").replace("_", "-")
        parts.append(spelt if value is True else f'{spelt}="{escape(str(value), quote=True)}"')
    opened = f"<{' '.join(parts)}>"
    return Markup(opened if name in _VOID else f"{opened}{join(*children)}</{name}>")


def join(*children: str | None) -> Markup:
    """Elements and text one after another."""
    return Markup(
        "".join(
            str.__str__(child) if isinstance(child, Markup) else escape(child)
            for child in children
            if child is not None
        )
    )
