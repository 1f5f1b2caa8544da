"""The page: head, sections, and everything that it needs inside of it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from lightning_longctx.tools.report.charts import COLOURS
from lightning_longctx.tools.report.html import Markup, join, tag
from lightning_longctx.tools.report.run import Run
from lightning_longctx.tools.report.sections import sections_of
from lightning_longctx.tools.report.setup import setup_of
from lightning_longctx.units import counted

__all__ = ["page_of"]

# Nothing is loaded from anywhere, and what the page says of itself holds even if something in it were not escaped.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page_of(runs: Sequence[Run], version: str) -> str:
    """The whole page as text.

    Args:
        runs: one, or several to compare.
        version: of this package, for the foot.
    """
    sections = sections_of(runs)
    title = (
        " and ".join(run.name for run in runs)
        if len(runs) < 3
        else f"{runs[0].name} and {counted(len(runs) - 1, 'more run')}"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title}: report"),
        tag("style", _file("report.css")),
    )
    origins = [_origin(run, min(n, COLOURS) if len(runs) > 1 else None) for n, run in enumerate(runs)]
    places = [tag("a", name, href=f"#{_anchor(name)}") for name, _ in sections]
    body = tag(
        "body",
        tag("header", tag("h1", title), *origins, tag("nav", *places)),
        tag("main", *(tag("section", tag("h2", name), content, id=_anchor(name)) for name, content in sections)),
        tag("footer", f"longctx report, lightning-longctx {version}"),
        tag("script", _file("report.js")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _origin(run: Run, colour: int | None) -> Markup:
    """Where a run is, when it was written last, and what was run."""
    source = f", read from the files of {run.logger}" if run.aside or run.logger != "CSVLogger" else ""
    written = f"{source}, last written {run.written:%Y-%m-%d %H:%M} UTC"
    key = None if colour is None else tag("i", class_=f"key c{colour}")
    return tag(
        "p", key, setup_of(run), tag("span", tag("code", str(run.path)), written, class_="origin"), class_="setup"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _file(name: str) -> Markup:
    return join(Markup(resources.files(__package__).joinpath(name).read_text(encoding="utf-8")))
