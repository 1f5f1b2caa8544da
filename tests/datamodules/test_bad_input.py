"""Mistakes of users, each answered before training with field, rule and value, or with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_longctx.datamodules import DynamicBatchingDataModule, LoadingSettings, SourceSettings
from lightning_longctx.errors import ConfigurationError, DataError
from tests.callbacks.toy import ToyLM, make_trainer
from tests.datamodules.helpers import Recorder, data_module, records

TEXT = {"a": [{"text": "hello"}]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loading": {"sed": 1}}, "`data.loading` must have known keys only, but got 'sed'. Did you mean 'seed'"),
        ({"packing": {"long_documents": "drop"}}, "Did you mean 'long_document'"),
        ({"loading": {"warmup": {"step": 3}}}, "Did you mean 'steps'"),
        ({"loading": 3}, "must be LoadingSettings, but got 3"),
        ({"micro_batch_size": 0}, "`data.micro_batch_size` must be a positive integer"),
        ({"max_seq_len": 10**30}, "at most 2,147,483,647"),
        ({"loading": {"warmup": {"steps": 3, "initial_tokens": "1M"}}}, "must be at most 4,096, the full budget"),
        ({"sources": {"a": {"path": "x", "weight": "x"}}}, "`data.sources.a` must have a positive `weight`"),
        ({"sources": {"a": {"path": "x", "min_tokens": 9, "max_tokens": 3}}}, "data.sources.a.min_tokens"),
        ({"loading": {"shuffle": "false"}}, "loading.shuffle"),
        ({"loading": {"balance": "no"}}, "loading.balance"),
        ({"loading": {"drop_last": 2}}, "loading.drop_last"),
        ({"loading": {"seed": 2**70}}, "loading.seed"),
        ({"packing": {"cut_to_fill": "yes"}}, "packing.cut_to_fill"),
        ({"packing": {"dynamic": "no"}}, "packing.dynamic"),
        ({"packing": {"physical_overflow_ratio": "a"}}, "packing.physical_overflow_ratio"),
    ],
)
def test_one_line_for_a_mistake(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DynamicBatchingDataModule(**{"sources": TEXT, **settings})
    assert message in str(caught.value)


def test_groups_may_be_mappings_in_python_too() -> None:
    data = DynamicBatchingDataModule(
        TEXT, loading={"seed": 7, "warmup": {"steps": 2}}, packing={"long_document": "drop"}
    )
    assert (data._assembly.loading.seed, data._assembly.loading.warmup.steps, data._assembly.packing.long_document) == (
        7,
        2,
        "drop",
    )
    assert LoadingSettings(warmup={"steps": 2}) == LoadingSettings(warmup=data._assembly.loading.warmup)


def test_brackets_without_end_are_a_bad_record(tmp_path: Path) -> None:
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000 + '\n   \n{"text": "fine"}\n')
    skip = DynamicBatchingDataModule({"a": str(file)}, max_seq_len=16, loading={"on_bad_record": "skip"})
    rows = list(skip.train_dataloader())
    assert [int(key[1]) for row in rows for key in row["document_keys"]] == [2]
    assert skip.counters["bad_records_skipped"] == 1
    assert skip.counters["documents_without_tokens"] == 1, "a line of spaces"
    with pytest.raises(DataError, match="deep.jsonl:1"):
        list(DynamicBatchingDataModule({"a": str(file)}, max_seq_len=16).train_dataloader())


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbfab")
    (row,) = DynamicBatchingDataModule({"a": str(tmp_path / "mark.txt")}, max_seq_len=16).train_dataloader()
    assert row["input_ids"].tolist() == [[97, 98, 256]]


class Small(ToyLM):
    """Says how many ids it has."""

    vocab_size = 10


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input_ids": [1, 99_999, 3]}, "below 10, the model's vocabulary, but got 99,999 in record 0 of source 'a'"),
        ({"input_ids": [1, 2], "labels": [-100, 500]}, "500 in the labels of record 0"),
        ({"input_ids": [1, 2], "labels": [-100, -5]}, "-5"),
    ],
)
def test_an_id_that_the_model_does_not_have_names_its_document(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        make_trainer([], max_steps=1).fit(Small(), datamodule=data_module({"a": [record] * 8}, shuffle=False))
    assert message in str(caught.value)


class Predicts(Recorder):
    """Returns the documents of each row."""

    def predict_step(self, batch: Any, batch_idx: int) -> list[list[int]]:
        return batch["document_keys"].tolist()


def test_predict_reads_the_validation_sources_in_order() -> None:
    module: LightningModule = Predicts()
    data = data_module({"a": records(4)}, validation_sources={"b": records(6)})
    predictions = make_trainer([]).predict(module, datamodule=data)
    keys = [key for row in predictions for key in row if key[0] >= 0]
    assert keys == [[1, number] for number in range(6)]


def test_settings_of_one_source_name_it() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.sources\.web"):
        SourceSettings.of("web", {"path": "x", "records": [1]})
