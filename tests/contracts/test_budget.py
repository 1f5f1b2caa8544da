"""The budget that keeps the house readable: lengths, nesting, numbers of parameters, a docstring in each module."""

from __future__ import annotations

import ast
import statistics

import pytest

from tests.contracts.source import ROOT, functions_of, length_of, nesting_of, package_sources

MAX_FILE = 400
MEDIAN_FILE = 180
MAX_FUNCTION = 60
MAX_NESTING = 3
MAX_PARAMETERS = 9  # about eight; the data module has seven and two groups

SOURCES = package_sources()
FOLDERS = ("lightning_longctx", "tests", "examples", "benchmarks")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_no_file_is_too_long(file: object) -> None:
    lines = len(file.read_text().splitlines())  # type: ignore[attr-defined]
    assert lines <= MAX_FILE, "split it"


def test_half_of_the_files_are_short() -> None:
    lengths = [len(source.splitlines()) for name, source in SOURCES.items() if not name.endswith("__init__")]
    assert statistics.median(lengths) <= MEDIAN_FILE


@pytest.mark.parametrize("name", SOURCES)
def test_functions_are_short_and_flat(name: str) -> None:
    found = [(f.name, f.lineno, length_of(f), nesting_of(f)) for f in functions_of(SOURCES[name])]
    assert [item for item in found if item[2] > MAX_FUNCTION or item[3] > MAX_NESTING] == []


@pytest.mark.parametrize("name", SOURCES)
def test_constructors_have_few_parameters(name: str) -> None:
    found = [
        (f.lineno, len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs) - 1)
        for f in functions_of(SOURCES[name])
        if f.name == "__init__"
    ]
    assert [item for item in found if item[1] > MAX_PARAMETERS] == [], "group some in a small dataclass"


@pytest.mark.parametrize("name", SOURCES)
def test_each_module_says_what_it_is(name: str) -> None:
    text = ast.get_docstring(ast.parse(SOURCES[name]))
    assert text, "a module starts with a docstring"
    assert text.splitlines()[0].endswith((".", ":"))


DEEP = """
def f(a):
    '''Doc
    string.'''
    for x in a:
        if x:
            with x:
                try:
                    pass
                finally:
                    pass
    if a: pass
    elif b: pass
    elif c: pass
    elif d: pass
"""


def test_the_measures_measure() -> None:
    (function,) = functions_of(DEEP)
    assert nesting_of(function) == 4
    assert length_of(function) == 13 - 2 + 1


def test_a_chain_of_elif_is_flat() -> None:
    chain = "def f(a):\n    if a: pass\n    elif b: pass\n    elif c: pass\n    else:\n        if d: pass"
    (function,) = functions_of(chain)
    assert nesting_of(function) == 1
