"""The documentation as a site: every page is found, each plug-in's page is whole, pictures are what scripts draw."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contracts.pages import DOCS, blocks_of, tables_of
from tests.contracts.source import PACKAGE, ROOT, package_sources
from tests.contracts.test_import_floors import CONTRACTS, _floor
from tests.helpers.scripts import load_script

PAGES = {page.name for page in DOCS.glob("*.md")}

#: One page for each plug-in. TrainingMetrics and ExactTokenMean share one.
PLUGIN_PAGES = [
    "activation_checkpointing.md",
    "activation_offload.md",
    "buffer_policies.md",
    "callbacks.md",
    "causal_lm_module.md",
    "channel_loss.md",
    "checkpoint.md",
    "data_module.md",
    "max_tokens.md",
    "moe_router_heatmap.md",
    "run_guard.md",
    "strategy.md",
    "tiled_mlp.md",
]
#: What each has: a pattern of its text.
ASPECTS = {
    "configuration": r"^```yaml$",
    "settings": r"^\| (setting|option|argument|parameter\b.*|callback) \|",
    "metrics": r"^## (What is logged|What it reports|How to read it)|^\| logged",
    "limits": r"^## .*([Ll]imits|[Rr]efused|go wrong)|\*\*Limits\*\*",
    "evidence": r"`?tests/|benchmarks[./]",
}


class _Anything(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags of Python objects are none of ours."""


_Anything.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Anything)  # noqa: S506 - a SafeLoader


def in_nav(entries: list[Any]) -> list[str]:
    """The pages of a navigation, in order."""
    found: list[str] = []
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            found += in_nav(target) if isinstance(target, list) else [target]
    return found


FIGURES = load_script("docs/figures/make.py")


def test_every_page_is_in_the_navigation_once() -> None:
    listed = in_nav(SITE["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == PAGES


def test_every_page_is_in_the_table_of_pages() -> None:
    """``docs/README.md`` is the first page of the site, and of the folder."""
    links = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text()))
    assert links == PAGES - {"README.md"}


@pytest.mark.parametrize("aspect", ASPECTS)
@pytest.mark.parametrize("page", PLUGIN_PAGES)
def test_each_plugin_page_is_whole(page: str, aspect: str) -> None:
    assert re.search(ASPECTS[aspect], (DOCS / page).read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", FIGURES.FIGURES)
def test_each_figure_is_what_its_script_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS / "figures"), *sys.path])
    assert (DOCS / "images" / f"{name}.svg").read_text() == FIGURES.figure(name), "run python docs/figures/make.py"


def test_each_script_and_each_picture_is_used() -> None:
    scripts = {path.stem for path in (DOCS / "figures").glob("*.py")} - {"make", "svg"}
    assert scripts == set(FIGURES.FIGURES)
    text = "".join(page.read_text() for page in [*DOCS.glob("*.md"), ROOT / "README.md"])
    pictures = {path.name for path in (DOCS / "images").iterdir()}
    assert {name for name in pictures if f"images/{name}" not in text} == set()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_what_a_page_names_in_the_repository_is_there(page: str) -> None:
    """Files are named as code, since the site has pages only; a link out of ``docs/`` would lead nowhere on it."""
    text = (DOCS / page).read_text()
    named = re.findall(r"`((?:tests|benchmarks|examples|docs)/[\w./]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert re.findall(r"\]\(\.\./[^)]*\)", text) == []


# -- the picture of the architecture ---------------------------------------------------------------------------------


def test_the_picture_of_the_floors_is_true() -> None:
    """Each name on a floor of the picture is a module or folder that is there, by what it imports."""
    page = (DOCS / "architecture.md").read_text()
    (picture,) = [block.text for block in blocks_of(page, "architecture.md") if block.text.startswith("floor 4")]
    drawn: dict[str, int] = {}
    for line in picture.splitlines():
        floor, names = re.fullmatch(r"floor (\d)  (.*?)(?:   +.*)?", line).groups()  # type: ignore[union-attr]
        drawn |= {name.strip("/"): int(floor) for name in re.findall(r"\w+/?", names) if name not in {"and"}}
    sources = package_sources()
    modules = {name.removeprefix(f"{PACKAGE}."): _floor(name, source) for name, source in sources.items()}
    for name, floor in modules.items():
        place = name.partition(".")[0]
        if place in {"callbacks", "datamodules", "strategies"}:
            assert floor in {1, 2}
        else:
            assert drawn[place] == floor, f"{name} is on floor {floor}"
    places = {name.partition(".")[0] for name in modules}
    assert drawn.keys() <= places | {"pure", "parts"}
    assert {name for name, floor in drawn.items() if floor == 0} == CONTRACTS


# -- the site itself -------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert SITE["theme"]["font"] is False
    assert not {"extra_javascript", "hooks"} & SITE.keys()
    assert [name for name in SITE["extra_css"] if not (DOCS / name).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra `docs`")
    pytest.importorskip("mkdocstrings", reason="needs the extra `docs`")
    import subprocess

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    assert {name.replace(".md", ".html") for name in PAGES - {"README.md"}} < pages.keys()
    assert "index.html" in pages
    loads = re.compile(r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*\"[^>]*>")
    found = {name: loads.findall(text) for name, text in pages.items()}
    assert {name: tags for name, tags in found.items() if [tag for tag in tags if 'rel="canonical"' not in tag]} == {}


def test_tables_outside_of_blocks_are_read() -> None:
    text = "| a | b |\n|---|---|\n| `x` | 1 \\| 2 |\n\n```\n| no | table |\n```\n"
    assert tables_of(text) == [[["a", "b"], ["`x`", "1 \\| 2"]]]
