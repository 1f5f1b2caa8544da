"""Errors: one sentence with field, rule, value and remedy, in one piece on the other side of a process."""

from __future__ import annotations

import pickle

import pytest

from lightning_longctx import errors
from lightning_longctx.errors import (
    BatchContractError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DivergenceError,
    FieldError,
    raise_together,
)

KINDS = [BatchContractError, CheckpointError, ConfigurationError, DataError, DivergenceError, FieldError]


def test_all_kinds_are_tested() -> None:
    assert sorted([*(kind.__name__ for kind in KINDS), "raise_together"]) == errors.__all__


@pytest.mark.parametrize("kind", KINDS)
def test_message_has_all_four_parts(kind: type[FieldError]) -> None:
    error = kind("strategy.sequence_parallel_size", "must divide the world size", "3 for 4 processes", "Use 1, 2 or 4.")
    expected = "`strategy.sequence_parallel_size` must divide the world size, but got 3 for 4 processes. Use 1, 2 or 4."
    assert str(error) == expected
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("kind", KINDS)
def test_survives_pickling(kind: type[FieldError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a", "must b", [1, 2], "Do c.")))
    assert type(error) is kind
    assert (error.field, error.rule, error.got, error.fix) == ("a", "must b", [1, 2], "Do c.")
    assert str(error) == "`a` must b, but got [1, 2]. Do c."


def test_several_refusals_are_told_at_once() -> None:
    raise_together([])
    first, second = DataError("a", "must be", "1", "Do it."), DataError("b", "must have", "2", "Do it.")
    with pytest.raises(DataError) as alone:
        raise_together([first])
    assert alone.value is first
    with pytest.raises(DataError) as both:
        raise_together([first, second])
    assert str(both.value) == "`a` must be, but got 1; `b` must have, but got 2. Do it."
    with pytest.raises(DataError, match=r"`9` must be, but got 1; and `10`, `11` too\. Do it\.$"):
        raise_together([DataError(str(number), "must be", "1", "Do it.") for number in range(2, 12)])
