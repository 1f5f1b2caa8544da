"""Reads the package's source without importing it: modules, what they import, how deep and long their functions are."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lightning_longctx"
ROOT = Path(__file__).resolve().parents[2]

_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    """One imported name: its full dotted path, where it stands, and whether it runs when the module is imported."""

    target: str
    line: int
    at_import: bool


def package_sources() -> dict[str, str]:
    """The source of each module by dotted name; a package's name ends in ``.__init__``."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text() for file in files}


def imports_of(name: str, source: str) -> list[Import]:
    """All imports of a module, also those inside functions and under ``TYPE_CHECKING``."""
    return list(_imports(ast.parse(source), name, at_import=True))


def resolve(target: str, modules: Mapping[str, str]) -> str:
    """The module that an imported path belongs to: the longest known prefix (a package as ``.__init__``)."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for candidate in (prefix, f"{prefix}.__init__"):
            if candidate in modules:
                return candidate
    raise LookupError(f"{target} is no module of the package")


def is_external(target: str) -> bool:
    """Whether a path leads to an installed package: neither ours nor the standard library."""
    return top(target) not in {PACKAGE, *sys.stdlib_module_names}


def top(target: str) -> str:
    """The first part of a dotted path."""
    return target.partition(".")[0]


def functions_of(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, _FUNCTIONS))


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.body[0].lineno - function.lineno + (body[-1].end_lineno - body[0].lineno + 1 if body else 0)


def nesting_of(node: ast.AST) -> int:
    """How many blocks stand inside one another; ``elif`` goes no deeper, a function inside starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, nesting_of(child) + (isinstance(child, _BLOCKS) and not chained))
    return deepest


def _imports(node: ast.AST, module: str, at_import: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, module)
        yield from (Import(f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports(child, module, at_import=False)
        for child in node.orelse:
            yield from _imports(child, module, at_import)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, module, at_import and not isinstance(node, _FUNCTIONS))


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])
