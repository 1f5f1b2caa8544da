"""Weights that are set during a run: from a stated row on, in the state, and the same whatever is read ahead."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from lightning_longctx.datamodules import DynamicBatchingDataModule
from lightning_longctx.errors import ConfigurationError
from tests.datamodules.helpers import Recorder, data_module, keys_of, records, trainer


def _data(**settings: Any) -> DynamicBatchingDataModule:
    return data_module({"a": records(300, 8, 8), "b": records(300, 8, 8, seed=1)}, **settings)


def _share(rows: list[Any]) -> float:
    counts = Counter(source for row in rows for source, _ in keys_of(row))
    return counts[0] / counts.total()


@pytest.mark.parametrize("mixing", ["token", "sample"])
@pytest.mark.parametrize("workers", [0, 2])
def test_new_weights_hold_from_the_next_row_that_is_not_planned(mixing: str, workers: int) -> None:
    data = _data(mixing=mixing, num_workers=workers)
    rows = iter(data.train_dataloader())
    before = list(islice(rows, 20))
    data.set_source_weights({"a": 4.0})
    after = list(islice(rows, 40))
    assert abs(_share(before) - 0.5) < 0.05
    assert abs(_share(after) - 0.8) < 0.05
    keys = [key for row in before + after + list(rows) for key in keys_of(row)]
    assert len(keys) == len(set(keys)) == 600


@pytest.mark.parametrize("mixing", ["token", "sample"])
def test_weights_do_not_depend_on_what_was_read_ahead(mixing: str) -> None:
    runs = []
    for workers, runtime in ((0, "main"), (2, "main"), (0, "worker")):
        data = _data(mixing=mixing, num_workers=workers, runtime=runtime)
        rows = iter(data.train_dataloader())
        found = list(islice(rows, 5))
        data.set_source_weights({"a": 0.2})
        found += islice(rows, 9)
        data.set_source_weights({"b": 0.1, "a": 1.0})
        runs.append([keys_of(row) for row in [*found, *islice(rows, 20)]])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("mixing", ["token", "sample"])
@pytest.mark.parametrize("stop", [9, 10, 11, 12, 20])
@pytest.mark.parametrize("options", [{}, {"runtime": "worker"}, {"balance": True}])
def test_set_weights_survive_a_resume_at_any_row(mixing: str, stop: int, options: dict[str, Any]) -> None:
    def run(data: DynamicBatchingDataModule, stop: int | None) -> tuple[list[Any], dict[str, Any]]:
        found = []
        rows = iter(data.train_dataloader())
        for row in islice(rows, stop):
            found.append(keys_of(row))
            if len(found) == 9:
                data.set_source_weights({"b": 5.0})
        return found, data.state_dict()

    whole, _ = run(_data(mixing=mixing, **options), None)
    first, state = run(_data(mixing=mixing, **options), stop)
    other = _data(mixing=mixing, **options)
    other.load_state_dict(state)
    assert first + [keys_of(row) for row in other.train_dataloader()] == whole


def test_a_training_run_may_reweight_and_the_next_epoch_keeps_it() -> None:
    data, module = data_module({"a": records(240, 8, 8), "b": records(240, 8, 8)}), Recorder()

    def reweight(*_: Any) -> None:
        if module.trainer.global_step == 5:
            data.set_source_weights({"a": 9.0})

    module.on_train_batch_end = reweight  # type: ignore[method-assign]
    trainer(max_epochs=2).fit(module, data)
    half = len(module.seen) // 2
    counts = Counter(source for row in module.seen[half : half + 40] for source, _ in row)
    assert abs(counts[0] / counts.total() - 0.9) < 0.05
    assert len(module.seen) == 240


def test_weights_before_the_first_row() -> None:
    data = _data()
    data.set_source_weights({"a": 3.0})
    assert abs(_share(list(islice(data.train_dataloader(), 40))) - 0.75) < 0.05


@pytest.mark.parametrize(("weights", "named"), [({"c": 1.0}, "known source"), ({"a": 0.0}, "positive")])
def test_wrong_weights_are_refused(weights: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        _data().set_source_weights(weights)


def test_the_mix_is_that_of_packed_tokens_and_survives_a_resume() -> None:
    data = _data()
    assert data.global_mix() == {}
    rows = list(islice(data.train_dataloader(), 7))
    assert data.global_mix() == {"a": _share(rows), "b": 1 - _share(rows)}
    other = _data()
    other.load_state_dict(data.state_dict())
    rows += islice(other.train_dataloader(), 8)
    assert other.global_mix()["a"] == pytest.approx(_share(rows))
