"""Settings read from constructors, and the two spellings of flags."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_longctx import DynamicBatchingDataModule, LongContextFSDPStrategy, TrainingMetrics
from lightning_longctx.cli.schema import (
    Place,
    class_names,
    constructor_settings,
    find_class,
    item_places,
    settings_at,
    spell_flag,
)
from tests.cli.toys import ToyModel, ToyOptimizer

PLACES = {
    "trainer": Place(default=Trainer),
    "model": Place(LightningModule, ToyModel),
    "data": Place(LightningDataModule, DynamicBatchingDataModule),
}


class _Child(ToyModel):
    def __init__(self, depth: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class _Open(LightningModule):
    def __init__(self, depth: int = 1, **anything: Any) -> None:
        super().__init__()


def test_settings_of_parents_come_through_keywords() -> None:
    settings, more = constructor_settings(_Child)
    assert list(settings) == ["depth", "width", "optimizer"]
    assert not more
    assert settings["optimizer"].hint is ToyOptimizer


def test_keywords_without_a_taker_allow_any_key() -> None:
    assert settings_at(Place(LightningModule, _Open)) is None or constructor_settings(_Open)[1] is False


def test_one_hint_that_cannot_be_read_hides_no_other() -> None:
    settings, _ = constructor_settings(DynamicBatchingDataModule)
    found = settings_at(settings["loading"])
    assert found is not None
    assert "num_workers" in found[1]
    values = item_places(settings["sources"])[1]
    assert values is not None
    assert settings_at(values) is not None


def test_class_names_hold_this_package_and_lightning() -> None:
    callbacks = class_names(constructor_settings(Trainer)[0]["callbacks"])
    assert callbacks["TrainingMetrics"] is TrainingMetrics
    assert "ModelCheckpoint" in callbacks
    assert find_class(Place(Strategy | str), "LongContextFSDPStrategy") is LongContextFSDPStrategy
    assert find_class(Place(Callback), "tests.cli.toys.ToyModel") is ToyModel
    assert find_class(Place(Callback), "no_such_module.Thing") is None


@pytest.mark.parametrize(
    ("word", "spelled"),
    [
        ("--trainer.max-steps", "--trainer.max_steps"),
        ("--trainer.max-steps=-1", "--trainer.max_steps=-1"),
        ("--print-config", "--print_config"),
        ("--ckpt-path=a-b.ckpt", "--ckpt_path=a-b.ckpt"),
        ("--trainer.callbacks+=My-Thing", "--trainer.callbacks+=My-Thing"),
        ("--data.max-seq-len", "--data.max_seq_len"),
        ("--data.loading.num-workers=1", "--data.loading.num_workers=1"),
        ("--data.init_args.max-seq-len", "--data.init_args.max_seq_len"),
        ("--data.sources.my-code", "--data.sources.my-code"),
        ("--data.sources.my-code.min-tokens", "--data.sources.my-code.min_tokens"),
        ("--trainer.strategy.sequence-parallel-size", "--trainer.strategy.sequence_parallel_size"),
        ("--unknown-key.other-key", "--unknown_key.other_key"),
        ("a-value", "a-value"),
        ("-1", "-1"),
        ("--", "--"),
    ],
)
def test_dashes_in_keys_are_underscores_and_names_stay(word: str, spelled: str) -> None:
    tree = {"trainer": {"strategy": "LongContextFSDPStrategy"}}
    assert spell_flag(word, tree, PLACES) == spelled
