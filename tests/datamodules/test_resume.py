"""Exactly once: whatever is stopped, and however often, the documents go on as in the unbroken run."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_longctx.errors import ConfigurationError, DataError
from tests.datamodules.helpers import Recorder, Stream, data_module, records, trainer


def _sources(kind: str) -> dict[str, Any]:
    if kind == "indexable":
        return {"a": records(20), "b": records(12, seed=1)}
    return {"a": Stream(records(20)), "b": records(12, seed=1)}


def _train(start: int | str | None = None, data: Any = None, **settings: Any) -> Recorder:
    """Fit, from the checkpoint of a step (or of that name) on, and keep a checkpoint after each step."""
    module = Recorder(estimate=settings.pop("estimate", False))
    every = ModelCheckpoint("steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit = trainer(callbacks=[every, *settings.pop("callbacks", [])], enable_checkpointing=True, **settings)
    name = f"step={start}" if isinstance(start, int) else start
    fit.fit(module, data or data_module(), ckpt_path=start and f"steps/{name}.ckpt")
    return module


@pytest.mark.parametrize("kind", ["indexable", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_two_stops_give_the_rows_of_the_unbroken_run(kind: str, workers: int) -> None:
    """ms-swift#4505, #4083: streams that are packed went on at the wrong place, or from the start, after a resume."""

    def data() -> Any:
        return data_module(_sources(kind), num_workers=workers)

    whole = _train(data=data())
    for path in Path("steps").iterdir():
        path.unlink()
    first = _train(None, data(), max_steps=3)
    second = _train(3, data(), max_steps=6)
    third = _train(6, data())
    assert first.seen + second.seen + third.seen == whole.seen
    assert first.tokens + second.tokens + third.tokens == whole.tokens
    assert len(first.seen) == 3
    assert len(second.seen) == 3
    keys = list(chain(*whole.seen))
    assert len(keys) == len(set(keys)) == 32


def test_a_touched_estimate_does_not_shift_the_rows() -> None:
    whole = _train(estimate=True, max_epochs=2)
    assert whole.seen == _train(max_epochs=2).seen
    _train(None, estimate=True, max_epochs=2)
    resumed = _train(3, estimate=True, max_epochs=2)
    assert resumed.seen == whole.seen[3:]


def test_a_row_fetched_before_the_restore_is_not_trained() -> None:
    whole = _train()
    data = data_module()
    fit = trainer()
    module = Recorder()
    saved = torch.load("steps/step=4.ckpt", weights_only=True)["DynamicBatchingDataModule"]

    def on_fit_start() -> None:
        fit.fit_loop.setup_data()  # what `estimated_stepping_batches` does
        data.load_state_dict(saved)

    module.on_fit_start = on_fit_start  # type: ignore[method-assign]
    fit.fit(module, data)
    assert module.seen == whole.seen[4:]


@pytest.mark.parametrize("stop", range(1, 12, 3))
def test_any_step_of_two_epochs_can_be_resumed(stop: int) -> None:
    whole = _train(None, max_epochs=3)
    rows = len(whole.seen)
    assert rows > 27
    for step in (stop, stop + 13):
        resumed = _train(step, max_epochs=3)
        assert resumed.seen == whole.seen[step:]


def test_the_last_step_of_an_epoch_and_its_end_can_be_resumed() -> None:
    whole = _train(None, max_epochs=3)
    epoch = next(i for i in range(1, 60) if len(set(chain(*whole.seen[:i]))) == 32)
    resumed = _train(epoch, max_epochs=3)
    assert resumed.seen == whole.seen[epoch:]
    end = ModelCheckpoint("steps", filename="end-{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    _train(callbacks=[end], max_epochs=2)
    resumed = _train("end-epoch=0", callbacks=[end], max_epochs=3)
    assert resumed.seen == whole.seen[epoch:]


def test_inside_an_accumulation_window_the_window_comes_again() -> None:
    data, module = data_module(), Recorder()
    states: list[dict[str, Any]] = []
    module.on_train_batch_end = lambda *_: states.append(data.state_dict())  # type: ignore[method-assign]
    trainer(accumulate_grad_batches=3).fit(module, data)
    starts = []
    for state in states[:9]:
        other = data_module()
        other.load_state_dict(state)
        starts.append(next(iter(other.train_dataloader()))["document_keys"].tolist())
    rows = [[list(key) for key in row] for row in module.seen]
    assert starts == [rows[0], rows[0], rows[3], rows[3], rows[3], rows[6], rows[6], rows[6], rows[9]]


def test_accumulation_resumes_at_a_step_boundary() -> None:
    whole = _train(None, accumulate_grad_batches=4, max_epochs=2)
    resumed = _train(2, accumulate_grad_batches=4, max_epochs=2)
    assert resumed.seen == whole.seen[8:]


def test_limited_batches_go_on_through_the_pass() -> None:
    whole = _train()
    limited = _train(limit_train_batches=3, max_epochs=3)
    assert limited.seen == whole.seen[:9]


def test_lightning_does_not_say_that_the_data_cannot_be_resumed() -> None:
    """With a number of batches it looks for the loader's own state, and warns where there is none. Here: an error."""
    _train(limit_train_batches=4, max_epochs=1)
    before = list(warnings.filters)
    resumed = _train(3, limit_train_batches=4, max_epochs=2)
    assert len(resumed.seen) == 5
    assert list(warnings.filters) == before


def test_a_resume_that_lightning_takes_for_finished_is_said() -> None:
    whole = _train()

    def run(start: str | None, **limits: int) -> Any:
        at_end = ModelCheckpoint("steps", filename="end", save_on_train_epoch_end=True)
        return _train(start, callbacks=[at_end], **limits).seen

    assert run(None, max_steps=3, max_epochs=1) == whole.seen[:3]
    with pytest.warns(UserWarning, match=r"Nothing will be trained: Lightning counts 1 whole epoch.*after 3 rows"):
        assert run("end", max_steps=6, max_epochs=1) == []
    assert run("end", max_steps=6, max_epochs=-1) == whole.seen[3:6]


def test_another_number_of_workers_continues_alike() -> None:
    whole = _train(None, data_module(num_workers=2))
    resumed = _train(5, data_module(num_workers=0))
    assert resumed.seen == whole.seen[5:]


def test_the_new_policy_wins_and_loses_nothing() -> None:
    whole = _train()
    resumed = _train(5, data_module(size=9, micro_batch_size=2))
    before, after = list(chain(*whole.seen[:5])), list(chain(*resumed.seen))
    assert sorted(before + after) == sorted(chain(*whole.seen))
    assert len(resumed.seen) < len(whole.seen) - 5


def test_the_checkpoint_is_plain_and_small(tmp_path: Path) -> None:
    long = [{"input_ids": [1] * 30_000} for _ in range(300)]
    data = data_module({"a": long}, size=200, max_seq_len=32_768)
    next(iter(data.train_dataloader()))
    path = tmp_path / "state.pt"
    torch.save(data.state_dict(), path)
    assert path.stat().st_size < 50_000
    assert torch.load(path, weights_only=True).keys() == data.state_dict().keys()


def test_a_stream_stores_waiting_documents_as_the_smallest_integers(tmp_path: Path) -> None:
    data = data_module({"a": Stream([{"input_ids": [1] * 100, "labels": [-100] * 100}] * 60)}, size=50, max_seq_len=128)
    next(iter(data.train_dataloader()))
    torch.save(data.state_dict(), tmp_path / "state.pt")
    candidates = data.state_dict()["ranks"][0]["candidates"]
    assert len(candidates["tokens"]) == len(candidates["index"]) == 49
    assert candidates["tokens"][0][0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "loading.seed: 1 instead of 42"),
        ({"shuffle": False}, "loading.shuffle"),
        ({"sources": {"a": records(20), "b": Stream(records(12, seed=1))}}, "sources.b: a stream instead of 12"),
        ({"sources": {"a": records(21), "b": records(12, seed=1)}}, "sources.a: 21 documents"),
    ],
)
def test_another_order_is_refused(change: dict[str, Any], named: str) -> None:
    data = data_module()
    next(iter(data.train_dataloader()))
    other = data_module(**change)
    other.load_state_dict(data.state_dict())
    with pytest.raises(ConfigurationError, match="order of documents") as caught:
        other.train_dataloader()
    assert named in str(caught.value)


def test_a_stream_that_became_shorter_is_named() -> None:
    data = data_module({"a": Stream(records(20))}, size=2)
    rows = iter(data.train_dataloader())
    for _ in range(4):
        next(rows)
    other = data_module({"a": Stream(records(5))}, size=2)
    other.load_state_dict(data.state_dict())
    with pytest.raises(DataError, match=r"data\.sources\.a` must have the records that were read before the stop"):
        list(other.train_dataloader())


def test_a_document_that_changed_is_named() -> None:
    old, new = records(20), records(20)
    data = data_module({"a": old}, size=20)
    next(iter(data.train_dataloader()))
    for record in new:
        record["input_ids"] = record["input_ids"][:-1]
    other = data_module({"a": new}, size=20)
    other.load_state_dict(data.state_dict())
    with pytest.raises(DataError, match="tokens it gave before the stop"):
        next(iter(other.train_dataloader()))


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_another_number_of_ranks_deals_the_rest_anew(before: int, after: int) -> None:
    """Hand-made layouts without processes: rank r draws its own number of rows, then the states are merged."""
    from lightning_longctx.datamodules.state import restore_state, saved_state
    from lightning_longctx.topology import Topology

    seen: list[tuple[int, int]] = []
    merged: dict[str, Any] = {}
    for rank in range(before):
        data, rows = _on_rank(rank, before, None)
        for _ in range(2 + rank):
            seen += [tuple(key) for key in next(rows)["document_keys"].tolist()]  # type: ignore[misc]
        state = saved_state(data._ledger.used, data._training_settings())  # type: ignore[union-attr]
        merged = {**state, "ranks": {**merged.get("ranks", {}), **state["ranks"]}}
    for rank in range(after):
        topology = Topology(rank=rank, world_size=after, dp_rank=rank, dp_size=after)
        state = restore_state(merged, data_module()._training_settings(), topology)
        _, rows = _on_rank(rank, after, state)
        seen += [tuple(key) for row in rows for key in row["document_keys"].tolist()]  # type: ignore[misc]
    assert len(seen) == len(set(seen)) == 32


def _on_rank(rank: int, size: int, state: Any) -> Any:
    from lightning_longctx.datamodules.ledger import ConsumptionLedger
    from lightning_longctx.datamodules.rows import RowState
    from lightning_longctx.topology import Topology

    data = data_module()
    data._topology = Topology(rank=rank, world_size=size, dp_rank=rank, dp_size=size)  # no groups: ranks end alone
    data._ledger = ConsumptionLedger(state or RowState(dp_rank=rank, dp_size=size))
    return data, iter(data.train_dataloader())
