"""Errors by hand, and what they mean."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_longctx.tools.doctor.compare import Difference, judge, largest_difference, worst_of

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("got", "expected", "error", "where"),
    [
        ({"a": ONES}, {"a": ONES}, 0.0, ""),
        ({"a": ONES * 4, "b": ONES}, {"a": ONES * 4, "b": ONES * 2}, 0.5, "b"),
        ({"a": ONES * 4.5, "b": ONES}, {"a": ONES * 4, "b": ONES}, 0.125, "a"),
        ({}, {"a": ONES}, 1.0, "a"),
        ({"a": ONES}, {}, 1.0, "a"),
        ({"a": ONES * 0}, {}, 0.0, ""),
        ({}, {"a": ONES * 0}, 0.0, ""),
    ],
)
def test_the_largest_relative_error_and_its_name(got: dict, expected: dict, error: float, where: str) -> None:
    assert largest_difference(got, expected) == (error, where)


def test_what_is_not_a_number_is_the_largest() -> None:
    found = largest_difference({"a": ONES * math.nan, "b": ONES * 9}, {"a": ONES, "b": ONES})
    assert found == (math.inf, "a")
    assert judge(found.error, 1e-5) == "fault"


def test_a_gradient_that_is_zero_but_for_rounding_has_no_error_of_its_own() -> None:
    got, expected = {"bias": ONES * 1e-9, "a": ONES}, {"bias": ONES * -1e-9, "a": ONES}
    assert largest_difference(got, expected).error == pytest.approx(2.0)
    assert largest_difference(got, expected, floor=0.01) == pytest.approx((2e-7, "bias"))
    wrong = {"bias": ONES * 1e-3, "a": ONES}
    assert judge(largest_difference(wrong, expected, floor=0.01).error, 1e-5) == "fault", "a real one still shows"


@pytest.mark.parametrize(
    ("error", "margin", "verdict"),
    [
        (1e-6, 0.0, "ok"),
        (1e-4, math.inf, "fault"),
        (1e-4, 1e-3, "fault"),
        (1e-4, 1e-8, "tie"),
        (math.inf, 1.0, "fault"),
    ],
)
def test_verdicts(error: float, margin: float, verdict: str) -> None:
    assert judge(error, 1e-5, margin) == verdict


def test_a_larger_error_at_a_tie_hides_no_fault() -> None:
    tie, fault, right = (Difference(0.5, "tie"), 1e-8), (Difference(0.1, "fault"), 0.1), (Difference(1e-7, "ok"), 0.1)
    assert worst_of([right, tie, fault], 1e-5) == (fault[0], "fault")
    assert worst_of([right, tie], 1e-5) == (tie[0], "tie")
    assert worst_of([right], 1e-5) == (right[0], "ok")
