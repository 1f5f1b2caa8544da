"""The tables of ``docs/migration_veomni.md``: each setting of ours exists, and takes the value that is shown."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from lightning.pytorch import Trainer

import lightning_longctx
from lightning_longctx import CausalLMModule, DynamicBatchingDataModule, LongContextFSDPStrategy
from lightning_longctx.datamodules import FixedBufferPolicy, SourceSettings
from lightning_longctx.strategies import ActivationCheckpointing, ActivationOffload
from tests.contracts.pages import CODE, DOCS, tables_of

TABLES = [table for table in tables_of((DOCS / "migration_veomni.md").read_text()) if table[0][0] == "VeOmni"]
#: Everything in backticks in our column, and in the remarks what has the shape of a setting.
OURS = sorted({name for table in TABLES for row in table[1:] for name in CODE.findall(row[2])})
ROOTS: Mapping[str, Any] = {
    "data": DynamicBatchingDataModule,
    "model": CausalLMModule,
    "trainer": Trainer,
    "strategy": LongContextFSDPStrategy,
    "FixedBufferPolicy": FixedBufferPolicy,
}
#: Where a signature says a name, and the fields behind it are those of a class.
BEHIND = {
    ("data", "sources"): SourceSettings,
    ("strategy", "activation_offload"): ActivationOffload,
    ("strategy", "activation_checkpointing"): ActivationCheckpointing,
}


def exists(name: str) -> bool:
    """Whether a dotted name is a class of ours, or a setting of one."""
    root, *path = name.split(": ")[0].split(".")
    if not path:
        return root in lightning_longctx.__all__ or root == "ckpt_path"
    cls: Any = ROOTS.get(root, getattr(lightning_longctx, root, None))
    for place, part in enumerate(path):
        parameters = inspect.signature(cls).parameters if cls is not None else {}
        if part not in parameters:
            return False
        found = parameters[part].default
        cls = BEHIND.get((root, part)) or (type(found) if dataclasses.is_dataclass(found) else None)
        if place == len(path) - 1:
            return True
    return False


def takes(name: str) -> bool:
    """Whether a setting that is shown with a value takes it: a word must be one of the choices."""
    dotted, _, value = name.partition(": ")
    root, *path = dotted.split(".")
    if not value or root == "trainer":
        return True
    hints = typing.get_type_hints(ROOTS[root].__init__)
    return value in _words(hints[path[0]])


def _words(hint: Any) -> set[str]:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return set(arguments)
    return {word for argument in arguments for word in _words(argument)}


def test_the_table_has_every_section() -> None:
    theirs = {name for table in TABLES for row in table[1:] for name in CODE.findall(row[0])}
    for section, least in {
        "data.": 20,
        "train.accelerator.offload_config.": 5,
        "train.channel_loss.": 11,
        "train.checkpoint.": 10,
        "train.moe_load_balance_monitor_interval": 1,
    }.items():
        assert len([name for name in theirs if name.startswith(section)]) >= least, section


def test_no_option_stands_twice() -> None:
    theirs = [name for table in TABLES for row in table[1:] for name in CODE.findall(row[0])]
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize("name", OURS)
def test_each_setting_of_ours_exists(name: str) -> None:
    assert exists(name)
    assert takes(name)


@pytest.mark.parametrize(
    "name", ["data.loading.speed", "strategy.activation_offload.host", "ChannelLoss.every", "Loss"]
)
def test_a_setting_that_does_not_exist_is_found(name: str) -> None:
    assert not exists(name)


def test_a_value_that_is_no_choice_is_found() -> None:
    assert not takes("strategy.activation_offload: fast")


def test_an_absent_policy_becomes_fixed() -> None:
    (row,) = [row for table in TABLES for row in table if "dyn_bsz_buffer_policy" in row[0]]
    assert "absent: `fixed`" in row[1]
    assert "adaptive" in row[3]
    assert inspect.signature(DynamicBatchingDataModule).parameters["buffer_policy"].default == "adaptive"
