"""The data module in a Trainer on one device, and from a parsed configuration."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_longctx.batch import validate_packed_batch
from lightning_longctx.datamodules import DynamicBatchingDataModule, LoadingSettings, PackingSettings
from lightning_longctx.errors import ConfigurationError, DataError
from tests.datamodules.helpers import Recorder, Stream, data_module, keys_of, records, trainer


def _rows(data: DynamicBatchingDataModule) -> list[Any]:
    rows = list(data.train_dataloader())
    for row in rows:
        validate_packed_batch(row)
    return rows


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("long_document", ["split", "truncate", "drop"])
def test_every_token_is_packed_or_counted(long_document: Any, drop_last: bool) -> None:
    """trl#4554, #5075, #5076: packing cut off most tokens, and said nothing."""
    packing = PackingSettings(long_document, pad_to_multiple_of=8)
    data = data_module({"a": records(58, 0, 90)}, packing=packing, drop_last=drop_last)
    rows, counters = _rows(data), data.counters
    real = sum(int((row["source_ids"] >= 0).sum()) for row in rows)
    assert counters["tokens_packed"] == real
    assert counters["tokens_padding"] == sum(row["input_ids"].numel() for row in rows) - real
    lost = counters["tokens_dropped"] + counters["tokens_truncated"] + counters["tokens_left_over"]
    assert counters["tokens_read"] == real + lost == sum(len(r["input_ids"]) for r in records(58, 0, 90))
    assert counters["documents_without_tokens"] > 0
    assert all(row["input_ids"].numel() <= 32 and row["loss_divisor"] == 32 for row in rows)
    assert counters["rows"] == len(rows)


@pytest.mark.parametrize(("drop_last", "rows", "left"), [(False, 3, 0), (True, 2, 20)])
def test_the_last_short_row_is_given_unless_unwanted(drop_last: bool, rows: int, left: int) -> None:
    data = data_module({"a": records(3, 20, 20)}, size=1, drop_last=drop_last)
    assert len(_rows(data)) == rows
    assert (data.counters["tokens_left_over"], data.counters["documents_left_over"]) == (left, left // 20)


def test_a_small_set_under_a_large_gate_is_given_once() -> None:
    data = data_module({"a": records(50)}, size=200)
    keys = list(chain(*map(keys_of, _rows(data))))
    assert sorted(keys) == [(0, i) for i in range(50)]


def test_epochs_are_passes_in_new_orders() -> None:
    module = Recorder()
    trainer(max_epochs=2).fit(module, data_module())
    keys = list(chain(*module.seen))
    assert sorted(keys[:32]) == sorted(keys[32:]) == sorted(set(keys))
    assert keys[:32] != keys[32:]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_nothing_in_a_row(workers: int) -> None:
    """VeOmni#126, #383: a worker took itself for the only process."""
    for row, other in zip(_rows(data_module()), _rows(data_module(num_workers=workers)), strict=True):
        assert torch.equal(row["cu_seqlens"], other["cu_seqlens"])
        assert torch.equal(row["document_keys"], other["document_keys"])
        assert torch.equal(row["input_ids"], other["input_ids"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_stops_or_is_counted(workers: int) -> None:
    Path("a.jsonl").write_text('{"text": "fine"}\n{"text": \n{"txt": "x"}\n{"text": "good"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        _rows(data_module({"a": "a.jsonl"}, shuffle=False, num_workers=workers))
    data = data_module({"a": "a.jsonl"}, shuffle=False, num_workers=workers, on_bad_record="skip")
    assert list(chain(*map(keys_of, _rows(data)))) == [(0, 0), (0, 3)]
    assert data.counters["bad_records_skipped"] == 2


def test_a_long_document_under_error_stops() -> None:
    data = data_module({"a": records(3, 40, 40)}, packing=PackingSettings("error"))
    with pytest.raises(DataError, match="40 tokens in record"):
        _rows(data)


def test_validation_has_its_own_documents_and_starts_anew_each_time() -> None:
    held_out = {"b": records(5, seed=3), "c": Stream(records(4, seed=4))}
    data, module = data_module(validation_sources=held_out), Recorder()
    assert data.source_names == ["a", "b", "c"]
    fit = trainer(max_epochs=2, num_sanity_val_steps=1, val_check_interval=1.0)
    fit.fit(module, data)
    sanity, *passes = module.evaluated
    size = len(passes) // 2
    assert passes[:size] == passes[size:]
    assert sanity == passes[0]
    keys = list(chain(*passes[:size]))
    assert sorted(keys) == [(1, i) for i in range(5)] + [(2, i) for i in range(4)]
    assert [number for source, number in keys if source == 2] == [0, 1, 2, 3]
    assert len(set(chain(*module.seen))) == 32  # validation took nothing from training


def test_without_validation_sources_a_fit_does_not_validate_and_validate_reads_a_sample() -> None:
    data, module = data_module(), Recorder()
    run = trainer()
    run.fit(module, data)
    assert module.evaluated == []
    run.validate(module, data)
    first, module.evaluated = module.evaluated, []
    assert len(list(chain(*first))) == 16
    run.test(module, data)
    assert module.evaluated == first
    assert run.limit_val_batches == 1.0


def test_a_module_that_only_trains_is_not_told_of_a_loader_that_nobody_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Recorder, "validation_step")
    trainer().fit(Recorder(), data_module())  # warnings are errors
    with pytest.warns(UserWarning, match="`val_dataloader` but have no `validation_step`"):
        trainer().fit(Recorder(), data_module(validation_sources={"v": records(3)}))


def test_validating_a_checkpoint_does_not_move_the_training_data() -> None:
    first, data = Recorder(), data_module()
    run = trainer(max_steps=3)
    run.fit(first, data)
    run.save_checkpoint("three.ckpt")
    other, module = data_module(), Recorder()
    trainer().validate(module, other, ckpt_path="three.ckpt")
    trainer(max_steps=3).fit(module, other)
    assert module.seen == first.seen


def test_the_loader_claims_nothing_that_it_does_not_know() -> None:
    loader = data_module().train_dataloader()
    for name in ("__len__", "state_dict", "load_state_dict", "sampler", "batch_sampler", "dataset"):
        assert not hasattr(loader, name)


def test_global_batch_tokens_gives_the_accumulation() -> None:
    module, run = Recorder(), trainer(max_steps=4)
    run.fit(module, data_module(global_batch_tokens=96))
    assert len(module.seen) == 12
    with pytest.raises(ConfigurationError, match="must not be set twice"):
        trainer(accumulate_grad_batches=2).fit(Recorder(), data_module(global_batch_tokens=96))


def test_a_second_fit_may_bring_another_step() -> None:
    run = trainer(max_steps=2, max_epochs=-1)
    run.fit(Recorder(), data_module(global_batch_tokens=96))
    assert run.accumulate_grad_batches == 1
    module = Recorder()
    run.fit_loop.epoch_loop.max_steps = 4
    run.fit(module, data_module(global_batch_tokens=64))
    assert (run.global_step, len(module.seen)) == (4, 4)


def test_nobody_else_may_set_the_accumulation() -> None:
    run = trainer(callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
        run.fit(Recorder(), data_module(global_batch_tokens=96))
    module = Recorder()
    trainer(callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})]).fit(module, data_module())
    assert module.seen


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"global_batch_tokens": 100}, {}, r"100 = 3 x 32 \+ 4"),
        ({"global_batch_tokens": 96}, {"dp_size": 2}, r"96 = 1 x 64 \+ 32.*Use 64 or 128"),
        ({"global_batch_tokens": 32}, {"dp_size": 2}, "Use 64 or more"),
        ({"global_batch_tokens": 96}, {"dp_size": 2, "sp_size": 4}, r"32 tokens x 2 data-parallel ranks = 64"),
        ({}, {"sp_size": 3}, r"32 = 10 x 3 \+ 2.*Use 30\."),
        ({"packing": PackingSettings(pad_to_multiple_of=5)}, {}, r"32 = 6 x 5 \+ 2"),
        ({"max_seq_len": 30, "packing": PackingSettings(pad_to_multiple_of=6)}, {"sp_size": 4}, "12"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic(
    settings: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        data_module(**settings).check(**sizes)


def test_sizes_are_read_as_people_write_them() -> None:
    data = data_module({"a": [{"text": "a"}]}, max_seq_len="4K", micro_batch_size=2, global_batch_tokens="64K")
    assert (data.max_seq_len, data.max_tokens_per_batch, data.vocab_size) == (4096, 8192, 257)
    data.check(sp_size=8, dp_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": {}}, "mapping of sources by name"),
        ({"buffer_policy": "fixd"}, "Did you mean 'fixed'"),
        ({"tokenizer": "byts"}, "Did you mean 'bytes'"),
        ({"max_seq_len": 0}, r"data\.max_seq_len"),
        ({"sources": {"a": "nowhere/*.txt"}}, r"data\.sources\.a"),
    ],
)
def test_bad_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DynamicBatchingDataModule(**{"sources": {"a": records(3)}, **settings})


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (PackingSettings, {"long_document": "spilt"}, "Did you mean 'split'"),
        (PackingSettings, {"pad_to_multiple_of": 0}, "at least 1"),
        (LoadingSettings, {"stop_mode": "never"}, "forever"),
        (LoadingSettings, {"num_workers": -1}, "at least 0"),
        (LoadingSettings, {"on_bad_record": "ignore"}, "skip"),
        (LoadingSettings, {"on_uneven_end": "hang"}, "pad"),
    ],
)
def test_bad_groups_are_refused(group: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        group(**values)


def test_sources_that_give_no_row_are_an_error_and_not_an_endless_fit() -> None:
    data = data_module({"a": {"records": records(5), "min_tokens": 100}})
    with pytest.raises(DataError, match="at least one row"):
        trainer(max_steps=5, max_epochs=-1).fit(Recorder(), data)


def test_the_tokenizer_of_the_model() -> None:
    class Tokenizer:
        eos_token_id = 9

        def __len__(self) -> int:
            return 10

        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text)}

    data = data_module({"a": [{"text": "abc"}]}, tokenizer="from_model")
    assert data.vocab_size is None
    module = Recorder()
    module.load_tokenizer = Tokenizer  # type: ignore[assignment]
    trainer().fit(module, data)
    assert module.tokens == [[1, 1, 1, 9]]
    assert data.vocab_size == 10
    with pytest.raises(ConfigurationError, match="load_tokenizer"):
        trainer().fit(Recorder(), data_module({"a": [{"text": "abc"}]}, tokenizer="from_model"))


def test_document_keys_stay_on_the_host() -> None:
    data = data_module()
    moved = data.transfer_batch_to_device(next(iter(data.train_dataloader())), torch.device("meta"), 0)
    assert moved["document_keys"].device.type == "cpu"
    assert moved["input_ids"].device.type == "meta"


def test_a_summary_says_what_was_read_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    data = data_module({"a": records(58, 0, 90)}, packing=PackingSettings("truncate", 8))
    with caplog.at_level("INFO", "lightning.pytorch"):
        trainer().fit(Recorder(), data)
    line = next(message for message in caplog.messages if message.startswith("Data: "))
    for name in ("documents_truncated", "tokens_truncated", "documents_without_tokens", "tokens_padding", "rows"):
        assert f"{name.replace('_', ' ')} {data.counters[name]:,}" in line


def test_a_configuration_file_fills_every_setting() -> None:
    import lightning_longctx.cli.app  # noqa: F401 - teaches jsonargparse what a TokenCount is

    Path("a.jsonl").write_text('{"text": "fine"}\n')
    parser = ArgumentParser()
    parser.add_class_arguments(DynamicBatchingDataModule, "data")
    config = """
    data:
      sources:
        code: python-stdlib
        lines: {path: a.jsonl, weight: 0.4, min_tokens: 4, max_tokens: 64K}
      tokenizer: bytes
      max_seq_len: 64
      buffer_policy: {class_path: lightning_longctx.datamodules.FixedBufferPolicy, init_args: {size: 3}}
      packing: {long_document: truncate, pad_to_multiple_of: 8}
      loading: {num_workers: 0, seed: 7, stop_mode: first_exhausted}
    """
    data = parser.instantiate(parser.parse_string(config))["data"]
    assert data.source_names == ["code", "lines"]
    rows = _rows(data)
    assert all(row["input_ids"].numel() % 8 == 0 for row in rows)
    assert data.counters["documents_read"] >= 2
    assert data._assembly.sources[1].weight == 0.4
    assert data._assembly.sources[1].max_tokens == 65536
    assert data._policy.size == 3
    wrong = parser.parse_string("data: {sources: {lines: {path: a.jsonl, wieght: 1}}}")
    with pytest.raises(ConfigurationError, match="Did you mean 'weight'"):
        parser.instantiate(wrong)
