"""Tables of settings in the documentation against signatures: every setting is there, with the default that it has."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest

import lightning_longctx
from lightning_longctx.callbacks import ChannelOptions, CheckpointOptions
from lightning_longctx.datamodules import AdaptiveBufferPolicy, LoadingSettings, PackingSettings, SourceSettings
from lightning_longctx.integrations import OptimizerSettings, ScheduleSettings
from lightning_longctx.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    ProcessSettings,
    ShardingSettings,
    TiledMLP,
)
from tests.contracts.pages import CODE, DOCS, PAGES, page_name, tables_of
from tests.contracts.test_plugins import PLUGINS

_L = lightning_longctx
#: Page, class, and its groups by name: their settings are rows like `packing.long_document`.
TABLES: list[tuple[str, type, dict[str, type]]] = [
    (
        "data_module",
        _L.DynamicBatchingDataModule,
        {"packing": PackingSettings, "loading": LoadingSettings},
    ),
    ("data_module", SourceSettings, {}),
    ("buffer_policies", AdaptiveBufferPolicy, {}),
    ("strategy", _L.LongContextFSDPStrategy, {"sharding": ShardingSettings, "processes": ProcessSettings}),
    ("activation_checkpointing", ActivationCheckpointing, {}),
    ("activation_offload", ActivationOffload, {}),
    ("tiled_mlp", TiledMLP, {}),
    ("channel_loss", _L.ChannelLoss, {"options": ChannelOptions}),
    ("moe_router_heatmap", _L.MoERouterHeatmap, {}),
    ("checkpoint", _L.AsyncDCPCheckpoint, {}),
    ("checkpoint", CheckpointOptions, {}),
    ("max_tokens", _L.MaxTokens, {}),
    ("run_guard", _L.RunGuard, {}),
    ("causal_lm_module", _L.CausalLMModule, {"optimizer": OptimizerSettings, "schedule": ScheduleSettings}),
]
#: Said in words beside the table, or by the group's own rows.
ELSEWHERE = {("AsyncDCPCheckpoint", "options")}
#: What a default is called where a literal would not help: the class gives a number of bytes, or a number and its unit.
WORDS = {1 << 30: "1 GiB"}
HEADS = {"setting", "option", "argument"}
#: What people import from, beside the package itself; a name stands under the first that has it.
FOLDERS = ("callbacks", "datamodules", "integrations", "strategies", "cli", "integrations.transformers")

each_table = pytest.mark.parametrize(
    ("page", "cls", "groups"), TABLES, ids=[f"{page}-{cls.__name__}" for page, cls, _ in TABLES]
)


def settings_of(cls: type, groups: dict[str, type]) -> dict[str, Any]:
    """Names and defaults, with the fields of groups in the groups' place."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in groups:
            found |= {f"{name}.{inner}": default for inner, default in settings_of(groups[name], {}).items()}
        else:
            found[name] = parameter.default
    return found


def rows_of(page: str, names: set[str]) -> dict[str, str]:
    """Defaults by name, of the table on a page that has most of these names."""
    best: dict[str, str] = {}
    for table in tables_of((DOCS / f"{page}.md").read_text()):
        if table[0][0].split(" ")[0] not in {*HEADS, "parameter"}:
            continue
        has_default = table[0][1].startswith("default")
        rows = {name: cell for row in table[1:] for name, cell in _entries(row, has_default)}
        if len(names & rows.keys()) > len(names & best.keys()):
            best = rows
    return best


def _entries(row: list[str], has_default: bool) -> list[tuple[str, str]]:
    """Names and defaults of a row, which may hold several of both."""
    names = CODE.findall(row[0])
    cells = row[1].split(", ") if len(names) > 1 and row[1].count(", ") == len(names) - 1 else [row[1]] * len(names)
    return [(name, cell if has_default else "") for name, cell in zip(names, cells, strict=True)]


def agrees(default: Any, cell: str) -> bool:
    """Whether a cell says a default. None, groups and what a factory makes are described in words of the page."""
    if (
        default is None
        or default == ()
        or default is inspect.Parameter.empty
        or dataclasses.is_dataclass(default)
        or not cell
    ):
        return True
    if isinstance(default, timedelta):
        return cell == f"{default.total_seconds() / 60:g} minutes"
    if isinstance(default, bool):
        return cell.strip("`") == str(default).lower()
    if isinstance(default, tuple):
        return cell == ", ".join(map(str, default))
    if isinstance(default, (int, float)):
        return cell == WORDS.get(default) or re.match(rf"`?{re.escape(f'{default:g}')}(?![\d.])", cell) is not None
    if isinstance(default, str):
        return cell.startswith(f"`{default}`")
    return True


@each_table
def test_the_table_has_every_setting(page: str, cls: type, groups: dict[str, type]) -> None:
    settings = settings_of(cls, groups)
    rows = rows_of(page, settings.keys())
    missing = {name for name in settings if name not in rows and (cls.__name__, name) not in ELSEWHERE}
    assert missing == set()


@each_table
def test_the_table_has_no_other_setting(page: str, cls: type, groups: dict[str, type]) -> None:
    settings = settings_of(cls, groups)
    assert rows_of(page, settings.keys()).keys() - settings.keys() - groups.keys() == set()


@each_table
def test_the_table_has_the_defaults(page: str, cls: type, groups: dict[str, type]) -> None:
    settings = settings_of(cls, groups)
    rows = rows_of(page, settings.keys())
    wrong = {
        name: (rows[name], default) for name, default in settings.items() if not agrees(default, rows.get(name, ""))
    }
    assert wrong == {}


def test_each_plugin_with_settings_has_a_table() -> None:
    with_settings = {name for name, plugin in PLUGINS.items() if inspect.signature(plugin).parameters}
    assert with_settings - {cls.__name__ for _, cls, _ in TABLES} == {"TrainingMetrics"}, "one argument, in the text"


@pytest.mark.parametrize(
    ("default", "cell", "agree"),
    [
        (1, "1", True),
        (1, "16", False),
        (0.998, "0.998", True),
        (32, "32 rows", True),
        (False, "true", False),
        ("main", "`worker`", False),
        (timedelta(minutes=2), "10 minutes", False),
    ],
)
def test_a_wrong_default_is_found(default: Any, cell: str, agree: bool) -> None:
    assert agrees(default, cell) == agree


# -- one home for each setting: what a name means is said in one table ------------------------------------------------


def test_no_setting_has_two_tables() -> None:
    homes: dict[tuple[str, ...], list[str]] = {}
    for page in PAGES:
        for table in tables_of(page.read_text()):
            names = tuple(name for row in table[1:] for name in CODE.findall(row[0]))
            if table[0][0] in HEADS and table[0][1].startswith("default") and names:
                homes.setdefault(names, []).append(page_name(page))
    assert {names: pages for names, pages in homes.items() if len(pages) > 1} == {}


# -- lists of what there is ------------------------------------------------------------------------------------------


def test_the_list_of_callbacks_is_all_of_them() -> None:
    from lightning.pytorch import Callback

    (table,) = [table for table in tables_of((DOCS / "callbacks.md").read_text()) if table[0][0] == "callback"]
    listed = {name for row in table[1:] for name in CODE.findall(row[0])}
    assert listed == {name for name, plugin in PLUGINS.items() if issubclass(plugin, Callback)}


def test_the_reference_has_every_export() -> None:
    listed = re.findall(r"^::: lightning_longctx\.(\S+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    exported = [name for name in lightning_longctx.__all__ if not name.isupper()]
    more, seen = set(), set(lightning_longctx.__all__)
    for folder in FOLDERS:
        names = [name for name in import_module(f"lightning_longctx.{folder}").__all__ if not name.isupper()]
        more |= {f"{folder}.{name}" for name in names if name not in seen}
        seen.update(names)
    assert sorted(listed) == sorted({*exported, *more})
