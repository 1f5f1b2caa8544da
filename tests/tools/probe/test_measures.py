"""The figures against calculations by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_longctx.tools.probe.measures import Bucket, histogram, policy_figures, rank_figures
from lightning_longctx.tools.probe.streams import Draw, Entry, Row, Stream


def _row(*lengths: int, tail: bool = False, wait: int = 0, pool: int = 0, number: int = 0) -> Row:
    documents = tuple((0, number + index, length) for index, length in enumerate(lengths))
    return Row(documents, sum(lengths) / 10, tail, wait, len(lengths), pool)


def _stream(rows: Sequence[Row], rank: int = 0, documents: int = 2, seconds: float = 1.0, seed: int = 42) -> Stream:
    read = [Draw((Entry(0, number, 0, length, length - 1),), 0.0) for number, length in enumerate([4, 4, 4, 8])]
    return Stream(seed, rank, list(rows), documents, seconds, read, False)


def test_a_rank() -> None:
    rows = [_row(5, wait=1, pool=35), _row(9, wait=4, pool=12), _row(7, pool=10), _row(1, tail=True)]
    figures = rank_figures(_stream(rows), 10)
    assert (figures.first_fill, figures.steady_fill) == (0.5, pytest.approx(0.8))
    assert (figures.rows, figures.tail_rows, figures.longest_wait, figures.peak_windows) == (4, 1, 4, 3.5)


def test_a_rank_without_later_rows_has_no_steady_fill() -> None:
    assert rank_figures(_stream([_row(5), _row(2, tail=True)]), 10).steady_fill is None
    assert rank_figures(_stream([]), 10).first_fill is None


def test_all_ranks_together() -> None:
    first = _stream([_row(10), _row(8), _row(6)], documents=2, seconds=1.0)
    second = _stream([_row(6), _row(4)], rank=1, documents=6, seconds=4.0)
    figures = policy_figures("fixed", "gate", [first, second], 10, measured=True)
    assert figures.first_fills == [0.8]  # (10 + 6) / (2 x 10)
    assert figures.steady_fills == [pytest.approx(0.6)]  # (8 + 4) / 20; the third step is not one of all ranks
    assert figures.fills == [[0.8, pytest.approx(0.6)]]
    assert figures.worst_fill == 0.4
    assert figures.documents is not None
    assert (figures.documents.p50, figures.documents.slowest, figures.documents.skew) == (4.0, 6.0, 1.5)
    assert figures.seconds is not None
    assert (figures.seconds.p50, figures.seconds.slowest, figures.seconds.skew) == (2.5, 4.0, 1.6)


def test_imbalance() -> None:
    first, second = _stream([_row(6, 2)]), _stream([_row(2, 2, 2)], rank=1)
    figures = policy_figures("fixed", "gate", [first, second], 10, measured=True)
    ratio = 40 / ((40 + 12) / 2)  # 6^2 + 2^2 against 3 x 2^2
    assert figures.imbalance == [pytest.approx(ratio)]
    assert figures.mean_imbalance == pytest.approx(ratio)
    assert figures.lost_to_imbalance == pytest.approx(1 - 26 / 40)
    assert policy_figures("fixed", "gate", [first], 10, measured=True).mean_imbalance is None


def test_order_drift_is_of_the_first_third_against_all_that_was_read() -> None:
    rows = [_row(2, 2, number=10), _row(6, number=12), _row(9), _row(9), _row(9), _row(9)]
    figures = policy_figures("fixed", "gate", [_stream(rows)], 10, measured=True)
    assert figures.order_drift == pytest.approx((10 / 3) / 5 - 1)  # (2 + 2 + 6) / 3 documents; read: (4+4+4+8) / 4


def test_documents_that_are_cut_to_fill_a_row_are_no_shorter_ones() -> None:
    rows = [_row(4, 4, 1), _row(3, 4, number=2), *[_row(4, number=3)] * 4]  # the third one of 4 is cut, and one of 8
    figures = policy_figures("fixed", "gate", [_stream(rows)], 10, measured=True)
    assert figures.order_drift == pytest.approx(16 / 3.5 / 5 - 1)  # of 4, 4, 4 and half of 8; not of 4, 4, 1, 3 and 4


def test_tail_rows_of_any_rank_are_no_steady_rows() -> None:
    first = _stream([_row(10), _row(8), _row(8)])
    second = _stream([_row(10), _row(6), _row(1, tail=True)], rank=1)
    assert policy_figures("fixed", "gate", [first, second], 10, measured=True).steady_fills == [pytest.approx(0.7)]


def test_seeds_are_kept_apart() -> None:
    streams = [_stream([_row(fill), _row(fill)], seed=fill) for fill in (4, 6)]
    figures = policy_figures("fixed", "gate", streams, 10, measured=True)
    assert figures.steady_fills == [0.4, 0.6]
    assert [rank.seed for rank in figures.ranks] == [4, 6]


def test_a_policy_that_started_on_some_ranks_only_has_no_figures_of_all() -> None:
    figures = policy_figures("fixed", "gate", [_stream([_row(5)]), _stream([], rank=1)], 10, measured=False)
    assert figures.documents is None
    assert figures.first_fills == []
    assert [rank.rows for rank in figures.ranks] == [1, 0]


def test_the_hash_tells_documents_order_and_borders() -> None:
    rows = [_row(2, 3), _row(4, number=2)]
    base = rank_figures(_stream(rows), 10).choice
    assert rank_figures(_stream(list(rows), rank=3, seconds=9.0), 10).choice == base
    others = [
        rows[::-1],
        [_row(2, 3, 4)],
        [_row(2, 3), _row(5, number=2)],
        [_row(2, 3), _row(4, number=3)],
        rows[:1],
    ]
    assert len({base, *(rank_figures(_stream(other), 10).choice for other in others)}) == 6


def test_histogram() -> None:
    assert histogram([1, 2, 3, 3, 16]) == [
        Bucket(1, 1, 1),
        Bucket(2, 3, 8),
        Bucket(4, 0, 0),
        Bucket(8, 0, 0),
        Bucket(16, 1, 16),
    ]
    assert histogram([]) == []
