"""The floors of the house: a module imports only from floors below its own, and never from the folder next door.

Floor 0 holds the contracts, floor 1 the pure parts (torch only), floor 2 the Lightning plug-ins, floor 3 integrations
and tools, floor 4 the command line. In a plug-in folder the two lower floors are told apart by whether a module imports
Lightning: so a module that does not may not import one that does.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.contracts.source import PACKAGE, Import, imports_of, is_external, package_sources, resolve, top

CONTRACTS = {"batch", "errors", "loss", "recompute", "spelling", "token_mean", "topology", "units"}
PLUGIN_FOLDERS = {"callbacks", "datamodules", "strategies"}
PURE_FOLDERS = {"checkpoint"}
UPPER_FOLDERS = {"integrations", "tools"}

LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}
COMMAND_LINE = {"jsonargparse", "yaml"}
CORE = {"torch", "numpy", "torchdata", "typing_extensions", "PIL"}


def _place(name: str) -> tuple[str, str]:
    """Folder ('' for the package itself) and the rest of a module's name."""
    inner = name.removeprefix(f"{PACKAGE}.")
    folder, dot, rest = inner.partition(".")
    return (folder, rest) if dot else ("", inner)


def _floor(name: str, source: str) -> int:
    folder, rest = _place(name)
    if not folder:
        return 0 if rest in CONTRACTS else 4
    if folder in PURE_FOLDERS:
        return 1
    if folder in UPPER_FOLDERS:
        return 3
    if folder not in PLUGIN_FOLDERS:
        return 4
    plugin = rest == "__init__" or any(top(found.target) in LIGHTNING for found in imports_of(name, source))
    return 2 if plugin else 1


def breaches(modules: Mapping[str, str]) -> list[str]:
    """All breaches of the floors, each as a sentence."""
    found = []
    for name, source in modules.items():
        floor = _floor(name, source)
        for item in imports_of(name, source):
            problem = (
                _external(floor, name, item) if is_external(item.target) else _internal(floor, name, item, modules)
            )
            if problem:
                found.append(f"{name}:{item.line} (floor {floor}) imports {item.target}: {problem}")
    return found


def _external(floor: int, name: str, item: Import) -> str:
    library = top(item.target)
    if library == "transformers" and _place(name)[0] != "integrations":
        return "transformers belongs to integrations/"
    if floor >= 3:
        return ""
    if library in COMMAND_LINE:
        return "the command line belongs to floor 4"
    if library in LIGHTNING:
        return "" if floor == 2 else "Lightning starts at floor 2"
    if floor == 0 and library != "torch":
        return "the contracts need torch only"
    return "" if library in CORE or not item.at_import else "optional libraries are imported where they are used"


def _internal(floor: int, name: str, item: Import, modules: Mapping[str, str]) -> str:
    if top(item.target) != PACKAGE:
        return ""  # the standard library
    target = resolve(item.target, modules)
    target_floor, folder, target_folder = _floor(target, modules[target]), _place(name)[0], _place(target)[0]
    if target_floor > floor:
        return f"it is on floor {target_floor}"
    if {folder, target_folder} <= PLUGIN_FOLDERS and folder != target_folder:
        return "it is in the folder next door"
    if target_floor == floor < 4 and folder != target_folder:
        return "it is on the same floor in another folder"
    return ""


def test_the_house_stands() -> None:
    found = breaches(package_sources())
    assert not found, "\n".join(found)


def _house(**extra: str) -> dict[str, str]:
    modules = {
        "__init__": "from lightning_longctx.callbacks import Plugin",
        "batch": "import torch\nfrom lightning_longctx.errors import FieldError",
        "errors": "",
        "callbacks.__init__": "from lightning_longctx.callbacks.plugin import Plugin",
        "callbacks.plugin": "from lightning.pytorch import Callback\nfrom lightning_longctx.callbacks.sums import add",
        "callbacks.sums": "import torch\nfrom .. import batch",
        "strategies.__init__": "",
        "strategies.mesh": "import torch",
        "checkpoint.layout": "import torch",
        "integrations.hub": "import transformers\nfrom lightning_longctx.strategies.mesh import build",
        "cli": "import jsonargparse\nfrom lightning_longctx.callbacks import Plugin",
    }
    modules.update({name.replace("__of__", "."): source for name, source in extra.items()})
    return {f"{PACKAGE}.{name}": source for name, source in modules.items()}


def test_a_made_up_house_stands() -> None:
    assert breaches(_house()) == []


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("batch", "from lightning_longctx.callbacks.sums import add", "it is on floor 1"),
        ("batch", "import lightning", "Lightning starts at floor 2"),
        ("batch", "import numpy", "the contracts need torch only"),
        ("batch", "def later():\n    import lightning.pytorch as pl", "Lightning starts at floor 2"),
        ("batch", "from . import cli", "it is on floor 4"),
        ("callbacks.sums", "from lightning_longctx.callbacks.plugin import Plugin", "it is on floor 2"),
        ("callbacks.sums", "from lightning_longctx.callbacks import Plugin", "it is on floor 2"),
        ("callbacks.sums", "def f():\n    from .plugin import Plugin", "it is on floor 2"),
        ("callbacks.sums", "import lightning_longctx", "it is on floor 4"),
        ("callbacks.sums", "import transformers", "transformers belongs to integrations/"),
        ("callbacks.sums", "import matplotlib", "imported where they are used"),
        ("callbacks.sums", "import yaml", "the command line belongs to floor 4"),
        ("callbacks.plugin", "import lightning\nfrom lightning_longctx.strategies.mesh import m", "folder next door"),
        ("strategies.mesh", "from lightning_longctx.callbacks.sums import add", "folder next door"),
        ("strategies.mesh", "if TYPE_CHECKING:\n    from lightning_longctx.callbacks.sums import add", "next door"),
        ("checkpoint.layout", "import lightning", "Lightning starts at floor 2"),
        ("checkpoint.layout", "from lightning_longctx.strategies.mesh import m", "same floor in another folder"),
        ("tools.probe", "from lightning_longctx.integrations.hub import x", "same floor in another folder"),
        ("tools.probe", "import transformers", "transformers belongs to integrations/"),
        ("integrations.hub", "from lightning_longctx.cli import main", "it is on floor 4"),
    ],
)
def test_a_breach_is_found(module: str, source: str, why: str) -> None:
    found = breaches(_house(**{module.replace(".", "__of__"): source}))
    assert [sentence for sentence in found if sentence.startswith(f"{PACKAGE}.{module}:") and why in sentence], found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("callbacks.sums", "def f():\n    import matplotlib"),
        ("strategies.fsdp", "import lightning\nfrom lightning_longctx.checkpoint.layout import x"),
        ("tools.probe", "import lightning\nfrom lightning_longctx.callbacks import Plugin"),
        ("callbacks.plugin", "import lightning\nimport os.path\nfrom collections import abc"),
    ],
)
def test_what_is_allowed_is_not_reported(module: str, source: str) -> None:
    assert breaches(_house(**{module.replace(".", "__of__"): source})) == []
