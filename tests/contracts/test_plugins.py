"""What every exported plug-in must offer; a new one is found by its export and fails here until it is complete.

Checked are: it can be constructed, from YAML too; it is documented down to each constructor argument; all its functions
are annotated; the exports are sorted and true; and docs/ has a page that shows it.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy

import lightning_longctx
from tests.contracts.source import PACKAGE, ROOT

FOLDERS = ("callbacks", "datamodules", "integrations", "strategies")
BASES = (Callback, LightningDataModule, LightningModule, Strategy)
MAX_PARAMETERS = 9  # about eight; the data module has seven and two groups

#: What a plug-in needs to be constructed; one that is not listed works without arguments.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CausalLMModule": {"config": "tiny-llama"},
    "MaxTokens": {"target": 1024},
    "DynamicBatchingDataModule": {"sources": {"a": [{"text": "words"}]}, "max_seq_len": 64},
}


def _exports(module: ModuleType) -> list[tuple[str, Any]]:
    return [(name, getattr(module, name)) for name in module.__all__]


PACKAGES = [import_module(PACKAGE), *(import_module(f"{PACKAGE}.{folder}") for folder in FOLDERS)]
EXPORTED = {name: thing for package in PACKAGES for name, thing in _exports(package)}
PLUGINS = {name: thing for name, thing in EXPORTED.items() if isinstance(thing, type) and issubclass(thing, BASES)}
DOCUMENTED = {name: thing for name, thing in EXPORTED.items() if inspect.isclass(thing) or inspect.isfunction(thing)}

each_plugin = pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
each_export = pytest.mark.parametrize("thing", DOCUMENTED.values(), ids=DOCUMENTED)


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: the order that ruff and isort use."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _is_written_here(function: Callable[..., Any]) -> bool:
    file = Path(function.__code__.co_filename)
    return file.is_relative_to(ROOT / PACKAGE) or file.is_relative_to(ROOT / "tests")


def own_functions(cls: type) -> dict[str, Callable[..., Any]]:
    """Functions and properties that a class itself defines, by name, private ones too; no generated ones."""
    found = {}
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and _is_written_here(inspect.unwrap(function)):
            found[name] = function
    return found


def undocumented(cls: type) -> list[str]:
    """Own public functions without a docstring; hooks of the host class inherit theirs."""
    return [
        name
        for name, function in own_functions(cls).items()
        if not name.startswith("_")
        and not inspect.getdoc(function)
        and not any(hasattr(base, name) for base in cls.__mro__[1:])
    ]


def unannotated(function: Callable[..., Any]) -> list[str]:
    """Parameters of a function without a type, and its return."""
    signature = inspect.signature(function)
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.annotation is parameter.empty and parameter.name not in {"self", "cls"}
    ]
    return missing + ["return"] * (signature.return_annotation is signature.empty)


def unexplained(cls: type) -> list[str]:
    """Constructor parameters that the docstring has no entry for."""
    lines = {line.strip().partition(":")[0].partition(" (")[0] for line in inspect.getdoc(cls).splitlines()}
    return [name for name in inspect.signature(cls).parameters if name not in lines]


def test_plugins_are_found() -> None:
    expected = {
        "ChannelLoss",
        "DynamicBatchingDataModule",
        "ExactTokenMean",
        "LongContextFSDPStrategy",
        "TrainingMetrics",
    }
    assert expected <= PLUGINS.keys()


def test_each_entry_belongs_to_a_plugin() -> None:
    assert ARGUMENTS.keys() <= PLUGINS.keys()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_exports_are_sorted_and_true(package: ModuleType) -> None:
    assert package.__all__ == sorted(package.__all__, key=_order)
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(thing is not None for _, thing in _exports(package))
    assert inspect.getdoc(package)


def test_each_plugin_is_exported_by_the_package_itself() -> None:
    assert PLUGINS.keys() <= set(lightning_longctx.__all__), "YAML and users write lightning_longctx.<Name>"


@each_plugin
def test_can_be_constructed(plugin: type) -> None:
    assert isinstance(plugin(**ARGUMENTS.get(plugin.__name__, {})), BASES)


@each_plugin
def test_can_be_filled_from_yaml(plugin: type) -> None:
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(plugin, "plugin", fail_untyped=True)
    assert {f"plugin.{name}" for name in inspect.signature(plugin).parameters} <= {
        name.split("--")[-1] for name in added
    }


@each_plugin
def test_has_few_parameters(plugin: type) -> None:
    assert len(inspect.signature(plugin).parameters) <= MAX_PARAMETERS, "group some in a small dataclass"


@each_plugin
def test_has_a_page_that_shows_it(plugin: type) -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if plugin.__name__ in page.read_text()]
    assert {page.name for page in pages} - {"README.md", "architecture.md", "adding_a_plugin.md"}


@each_export
def test_is_documented(thing: Any) -> None:
    text = inspect.getdoc(thing)
    assert text
    assert text.splitlines()[0].rstrip().endswith((".", ":"))
    if inspect.isclass(thing):
        assert undocumented(thing) == []


@pytest.mark.parametrize(
    "cls",
    [thing for name, thing in DOCUMENTED.items() if name in PLUGINS or dataclasses.is_dataclass(thing)],
    ids=lambda cls: cls.__name__,
)
def test_each_argument_is_explained(cls: type) -> None:
    assert unexplained(cls) == []


@each_export
def test_is_annotated(thing: Any) -> None:
    functions = own_functions(thing) if inspect.isclass(thing) else {thing.__name__: thing}
    assert {name: unannotated(function) for name, function in functions.items() if unannotated(function)} == {}


@each_plugin
def test_class_can_be_pickled_by_name(plugin: type) -> None:
    assert pickle.loads(pickle.dumps(plugin)) is plugin


class _Sloppy(Callback):
    """Made up."""

    def __init__(self, depth, width: int = 1) -> None:
        self.depth = depth

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def report(self): ...

    @property
    def size(self) -> int: ...


def test_the_checks_find_what_is_missing() -> None:
    assert undocumented(_Sloppy) == ["report", "size"]
    assert unexplained(_Sloppy) == ["depth", "width"]
    assert unannotated(_Sloppy.__init__) == ["depth"]
    assert unannotated(_Sloppy.report) == ["return"]
    assert sorted(["causal", "Topology", "PAD", "Batch"], key=_order) == ["PAD", "Batch", "Topology", "causal"]
