"""Ranks agree on rows, on the end and on errors, with 2 and 4 processes; a hang fails by the pool's limit."""

from __future__ import annotations

import os
import time
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_longctx.batch import validate_packed_batch
from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.errors import DataError
from lightning_longctx.topology import Topology
from tests.datamodules.helpers import Recorder, Stream, data_module, keys_of, records, trainer
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.distributed

Keys = list[list[tuple[int, int]]]


def _topology(sp_size: int) -> Topology:
    """A layout made by hand: neighbours share a row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(i, i + sp_size))) for i in range(0, world, sp_size)]
    return Topology(
        rank=rank,
        world_size=world,
        dp_rank=rank // sp_size,
        dp_size=world // sp_size,
        sp_rank=rank % sp_size,
        sp_size=sp_size,
        sp_host_group=groups[rank // sp_size] if sp_size > 1 else None,
        host_group=dist.new_group(),
    )


def _data(sp_size: int, **settings: Any) -> DynamicBatchingDataModule:
    dist.init_process_group("gloo")
    data = data_module(**settings)
    data._topology = _topology(sp_size)
    return data


def _uneven(count: int) -> list[dict[str, Any]]:
    """With two ranks, rank 0 gets documents of 4 tokens and rank 1 of 30, so their numbers of rows differ."""
    return [{"input_ids": [1] * (4, 30)[i % 2]} for i in range(count)]


def _whole_rows(sp_size: int, workers: int) -> tuple[Keys, list[list[int]], int]:
    data = _data(sp_size, num_workers=workers)
    rows = list(data.train_dataloader())
    for row in rows:
        validate_packed_batch(row)
    return (
        [keys_of(row) for row in rows],
        [row["input_ids"][0].tolist() for row in rows],
        data.counters["documents_read"],
    )


@pytest.mark.parametrize(("world", "sp_size"), [(2, 2), (2, 1), (4, 2), (4, 4)])
def test_groups_share_rows_and_ranks_share_documents(world: int, sp_size: int) -> None:
    """VeOmni#126: bounds come from the whole row, and workers give those of the process that trains."""
    results = run_ranks(_whole_rows, world, sp_size, 2 if world == 2 else 0)
    groups = [results[i : i + sp_size] for i in range(0, world, sp_size)]
    for group in groups:
        assert all(member[:2] == group[0][:2] for member in group)
        assert group[0][2] > 0
        assert all(member[2] == 0 for member in group[1:])  # one reader a group
    assert len({len(keys) for keys, *_ in results}) == 1
    keys = list(chain.from_iterable(chain(*group[0][0]) for group in groups))
    assert len(keys) == len(set(keys))
    if world == sp_size:
        alone = [keys_of(row) for row in data_module().train_dataloader()]
        assert results[0][0] == alone


def _pad_rows(sp_size: int, sources: Any, on_uneven_end: str) -> tuple[Keys, dict[str, int]]:
    data = _data(sp_size, sources={"a": sources}, on_uneven_end=on_uneven_end, shuffle=False, size=1)
    rows = list(data.train_dataloader())
    for row in rows:
        validate_packed_batch(row)
    return [keys_of(row) for row in rows], data.counters


@pytest.mark.parametrize(("world", "sp_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("mode", ["stop", "pad"])
def test_an_uneven_end_is_agreed_and_counted(world: int, sp_size: int, mode: str) -> None:
    results = run_ranks(_pad_rows, world, sp_size, _uneven(20), mode)
    assert len({len(keys) for keys, _ in results}) == 1
    readers = results[::sp_size]
    served = list(chain.from_iterable(chain(*keys) for keys, _ in readers))
    left = sum(counters["documents_left_over"] for _, counters in readers)
    assert len(served) == len(set(served))
    assert (len(served), left) == (20, 0) if mode == "pad" else len(served) < 20 and left > 0
    assert len(readers[0][0]) == (10 if mode == "pad" else 2)


def _fit_ddp(accumulate: int) -> tuple[Keys, Keys, int, dict[str, int]]:
    module = Recorder()
    mode = "pad" if accumulate == 1 else "stop"
    sources = {"sources": {"a": _uneven(30)}, "validation_sources": {"v": _uneven(7)}}
    data = data_module(**sources, shuffle=False, size=1, on_uneven_end=mode)
    run = trainer(
        devices=dist_size(),
        strategy="ddp",
        max_epochs=2,
        val_check_interval=3 if accumulate == 1 else 1.0,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=2,
    )
    run.fit(module, data)
    return module.seen, module.evaluated, run.global_step, data.counters


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (2, 2), (4, 1)])
def test_a_fit_with_unequal_ranks_and_validation_ends(world: int, accumulate: int) -> None:
    start = time.monotonic()
    results = run_ranks(_fit_ddp, world, accumulate)
    assert time.monotonic() - start < 60
    assert len({(len(seen), len(evaluated), step) for seen, evaluated, step, _ in results}) == 1
    for half in range(2):  # two passes: within each, no document twice on any rank
        rows = [seen[half * (len(seen) // 2) : (half + 1) * (len(seen) // 2)] for seen, *_ in results]
        keys = list(chain.from_iterable(chain(*part) for part in rows))
        assert len(keys) == len(set(keys))
    # Without the two sanity rows, each document was validated on exactly one rank, equally often.
    counts = Counter(chain.from_iterable(chain(*evaluated[2:]) for _, evaluated, *_ in results))
    assert set(counts) == {(1, i) for i in range(7)}
    assert len(set(counts.values())) == 1


def _bad_record(sp_size: int, bad_rank: int) -> str:
    items: list[Any] = records(20)
    items[4 + bad_rank] = "no dict"
    data = _data(sp_size, sources={"a": items}, shuffle=False)
    try:
        list(data.train_dataloader())
    except DataError as error:
        return str(error)
    return "no error"


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    own, *others = run_ranks(_bad_record, 4, 2, 0)
    assert own.startswith("`data.sources.a` must give mappings")
    assert all("an error on rank 0: DataError" in text and "must give mappings" in text for text in others)


def _interrupted_tokenizer(sp_size: int) -> str:
    data = _data(sp_size, sources={"a": [{"text": "x" * 10}] * 20}, tokenizer=_fails_on_rank_one)
    try:
        list(data.train_dataloader())
    except (DataError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fails_on_rank_one(text: str) -> list[int]:
    return [1 // (1 - dist.get_rank())] * len(text)


def test_any_exception_of_a_tokenizer_is_told_to_all() -> None:
    other, own = run_ranks(_interrupted_tokenizer, 2, 1)
    assert own.startswith("ZeroDivisionError")
    assert "an error on rank 1: ZeroDivisionError" in other
    assert "Raised for record " in other


def _stop_and_resume(kind: Any) -> tuple[Keys, Keys, Keys, list[int]]:
    def data() -> DynamicBatchingDataModule:
        return data_module(sources={"a": kind(records(40)), "b": records(20, seed=1)})

    def fit(start: str | None = None, **settings: Any) -> Keys:
        module = Recorder()
        every = ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=3)
        run = trainer(devices=dist_size(), strategy="ddp", enable_checkpointing=True, callbacks=[every], **settings)
        run.fit(module, data(), ckpt_path=start)
        return module.seen

    stopped = fit(max_steps=3)
    saved = torch.load("steps/step=3.ckpt", weights_only=True)["DynamicBatchingDataModule"]
    return fit(), stopped, fit("steps/step=3.ckpt"), sorted(saved["ranks"])


@pytest.mark.parametrize("kind", [list, Stream])
def test_a_stock_checkpoint_holds_all_ranks(kind: Any) -> None:
    for whole, stopped, resumed, ranks in run_ranks(_stop_and_resume, 2, kind):
        assert stopped + resumed == whole
        assert len(stopped) == 3
        assert ranks == [0, 1]
