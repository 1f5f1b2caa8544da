"""Metadata is hidden from the module's steps, and the strategy is itself again afterwards, in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_longctx.callbacks.batch_filter import BatchFilter, without
from tests.callbacks.channels import BATCHES


class _Strategy:
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_a_copy_of_the_same_class_lacks_the_keys() -> None:
    class Named(dict[str, Any]):
        pass

    batch = Named(a=1, b=2)
    rest = without(batch, ["b", "c"])
    assert type(rest) is Named
    assert (rest, batch) == ({"a": 1}, {"a": 1, "b": 2})
    assert without(batch, ["b", "b"]) == {"a": 1}  # as two callbacks with the same key ask for
    assert without(batch, ["c"]) is batch
    assert without([1], ["a"]) == [1]


def test_a_packed_batch_keeps_its_contract() -> None:
    batch = BATCHES[0] | {"channel_id": 1}
    assert without(batch, ["channel_id", "source_ids"]) == BATCHES[0]
    assert without({"source_ids": 1, "x": 2}, ["source_ids"]) == {"x": 2}


def test_a_tokenizers_batch_stays_one() -> None:
    transformers = pytest.importorskip("transformers")
    rest = without(transformers.BatchEncoding({"input_ids": [1], "dataset_id": [0]}), ["dataset_id"])
    assert isinstance(rest, transformers.BatchEncoding)
    assert rest.input_ids == [1]
    assert "dataset_id" not in rest


@pytest.mark.parametrize("first_closes_first", [True, False])
def test_several_filters_in_any_order(first_closes_first: bool) -> None:
    strategy = _Strategy()
    filters = [BatchFilter(strategy, ["a"]), BatchFilter(strategy, ["b"])]
    batch = {"a": 1, "b": 2, "c": 3}
    assert strategy.training_step(batch, 0) == strategy.validation_step(batch, batch_idx=0) == {"c": 3}
    for number, one in enumerate(filters if first_closes_first else filters[::-1]):
        one.close()
        one.close()  # twice is no harm
        assert len(strategy.training_step(batch, 0)) == (3 if number else 2)
    assert vars(strategy) == {}
    again = BatchFilter(strategy, ["c"])
    assert strategy.training_step(batch, 0) == {"a": 1, "b": 2}
    again.close()
    assert vars(strategy) == {}


def test_others_wrappers_survive_or_may_be_gone() -> None:
    strategy = _Strategy()
    outer = strategy.training_step
    vars(strategy)["training_step"] = lambda *args: ["wrapped", outer(*args)]
    one = BatchFilter(strategy, ["a"])
    assert strategy.training_step({"a": 1}, 0) == ["wrapped", {}]
    one.close()
    assert strategy.training_step({"a": 1}, 0) == ["wrapped", {"a": 1}]
    two = BatchFilter(strategy, ["a"])
    del vars(strategy)["training_step"]  # as a callback does that wrapped it before us
    two.close()
    assert vars(strategy) == {}


def test_all_steps_of_a_real_strategy() -> None:
    strategy = SingleDeviceStrategy("cpu")
    before = dict(vars(strategy))
    one = BatchFilter(strategy, ["a"])
    assert vars(strategy).keys() - before.keys() == {"training_step", "validation_step", "test_step", "predict_step"}
    one.close()
    assert vars(strategy) == before
