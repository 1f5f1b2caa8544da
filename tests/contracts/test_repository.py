"""What may be in a file of this repository: plain text, no machine's own paths, nothing large; and which versions."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.contracts.source import ROOT, imports_of, is_external, package_sources, top

MAX_BYTES = 100_000
#: A path into somebody's machine, a package registry's host, a neighbour folder that is not in the repository.
FOREIGN = [
    r"(?<![\w.])/(work|opt|root|home|Users)/\w",
    r"(?<![\w/])(\.\./)*shared/\w",
    r"pypi\.org",
    r"pythonhosted\.org",
]
#: What stands at the top. A run from here leaves its own beside it (checkpoints, an export): `git add` takes it along.
TOP = {
    *(".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "STYLE.md", "benchmarks"),
    *("constraints.txt", "docs", "examples", "lightning_longctx", "mkdocs.yml", "pyproject.toml", "tests"),
}
#: Distribution names that differ from the module they hold.
DISTRIBUTION = {"PIL": "pillow", "yaml": "PyYAML"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _files(*more: str) -> list[Path]:
    """What is tracked, and with ``more`` what would be with the next ``git add``."""
    command = ["git", "ls-files", "--cached", "-z", *more]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return sorted(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def _everything() -> list[Path]:
    return _files("--others", "--exclude-standard")


def _requirements(lines: list[str]) -> dict[str, Requirement]:
    return {_plain(item.name): item for item in map(Requirement, lines)}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


CORE = _requirements(PROJECT["dependencies"])
EXTRAS = _requirements(
    [line for name, lines in PROJECT["optional-dependencies"].items() if name != "all" for line in lines]
)
PINS = _requirements(
    [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
)


def foreign_words(text: str) -> list[str]:
    """Passages that only make sense on one machine."""
    return [match.group() for pattern in FOREIGN for match in re.finditer(pattern, text)]


def test_no_file_speaks_of_one_machine() -> None:
    found = {str(file.relative_to(ROOT)): foreign_words(file.read_text(errors="replace")) for file in _everything()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("see " + "/wo" + "rk/main", 1),
        ("'/op" + "t/venv/bin'", 1),
        ("cp ../sha" + "red/notes.md", 1),
        ("https://pyp" + "i.org/simple", 1),
        ("a/work/b", 0),
        ("/workers/", 0),
        ("unshared/x, https://example.com/shared/x", 0),
    ],
)
def test_foreign_words_are_found(text: str, count: int) -> None:
    assert len(foreign_words(text)) == count


def test_no_run_left_anything() -> None:
    assert {file.relative_to(ROOT).parts[0] for file in _files()} == TOP


def test_files_are_small() -> None:
    assert {str(file) for file in _everything() if file.stat().st_size > MAX_BYTES} == set()


def test_no_checkpoint_of_a_test_has_slipped_in() -> None:
    endings = {".ckpt", ".distcp", ".pt", ".safetensors"}
    assert [path for path in _files() if path.suffix in endings or path.name == "COMMIT.json"] == []


def test_code_is_ascii() -> None:
    code = [file for file in _everything() if file.suffix in {".py", ".yaml", ".toml"}]
    assert [str(file) for file in code if not file.read_text().isascii()] == []


@pytest.mark.parametrize("requirement", [*CORE.values(), *EXTRAS.values()], ids=str)
def test_each_dependency_has_a_lower_bound_and_a_tested_version(requirement: Requirement) -> None:
    assert [part.operator for part in requirement.specifier] == [">="], "a lower bound, and no guess about the future"
    pin = PINS[_plain(requirement.name)]
    (version,) = pin.specifier
    assert version.operator == "=="
    assert requirement.specifier.contains(version.version)


def test_everything_imported_is_declared() -> None:
    missing = set()
    for name, source in package_sources().items():
        optional = "integrations" in name.split(".")
        for item in imports_of(name, source):
            library = top(item.target)
            known = CORE if item.at_import and not optional else CORE | EXTRAS
            if is_external(item.target) and _plain(DISTRIBUTION.get(library, library)) not in known:
                missing.add((name, library))
    assert missing == set()


def test_every_core_dependency_is_used() -> None:
    used = {top(item.target) for name, source in package_sources().items() for item in imports_of(name, source)}
    assert {_plain(DISTRIBUTION.get(library, library)) for library in used} >= CORE.keys()
