"""Names of sources: never two with one key, the same after a resume, the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_longctx.callbacks.source_names import OPEN_SLOTS, SafeNames, SourceTable, agree_on_names
from lightning_longctx.errors import BatchContractError, ConfigurationError
from tests.helpers.pool import run_ranks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet="aA b/_-\u00e4\ud83d\ude00.~", max_size=4), max_size=12))
def test_keys_never_collide_and_are_safe(names: list[str]) -> None:
    safe = SafeNames(reserved=("coverage",))
    keys = {name: safe(name) for name in names}
    assert len({key.lower() for key in keys.values()}) == len(keys)
    assert all(key and key.isascii() and set(key) <= set("aAb_-.0123456789cdef") for key in keys.values())
    again = SafeNames(reserved=("coverage",))
    again.load_state_dict(safe.state_dict())
    assert {name: again(name) for name in reversed(names)} == keys  # in any order after a resume


def test_keys_stay_when_sources_come_and_go() -> None:
    first = SafeNames()
    assert first("a b") == "a_b"
    resumed = SafeNames()
    resumed.load_state_dict(first.state_dict())
    assert resumed("a_b") != "a_b"  # the new source must not go on with the old one's curve
    assert resumed("a b") == "a_b"


def test_reserved_and_long_names() -> None:
    safe = SafeNames(reserved=("coverage",))
    assert safe("coverage").startswith("coverage-")
    assert len(safe("x" * 300)) <= 100
    assert safe("x" * 300) != safe("x" * 301)


def test_dense_and_sparse_ids() -> None:
    ids = torch.tensor([[0, 2, -1], [1, 7, 90210]])
    assert SourceTable(["a", "b", "c"]).slots_of(ids).tolist() == [[0, 2, -1], [1, 3, 3]]  # 3 is out of range
    assert SourceTable(["a"]).slots_of(torch.tensor([2**32, -(2**32)])).tolist() == [1, -1]
    sparse = SourceTable({90210: "web", 2: "code"})
    assert sparse.slots_of(ids).tolist() == [[-1, 0, -1], [-1, -1, 1]]
    assert sparse.names() == ["code", "web"]
    assert sparse.ids_of_names(["web", "code", "else"]).tolist() == [90210, 2, -1]


def test_an_open_table_learns_names_once() -> None:
    table = SourceTable()
    assert (table.slots, table.name(3)) == (OPEN_SLOTS, "source_3")
    table.learn(3, "web")
    table.learn(3, "other")
    table.learn(OPEN_SLOTS, "beyond")
    assert table.learned() == {3: "web"}
    assert table.name(3) == "web"
    with pytest.raises(BatchContractError, match="source_names"):
        table.ids_of_names(["web"])


def test_a_closed_table_learns_nothing() -> None:
    table = SourceTable(["a"])
    table.learn(0, "b")
    assert table.name(0) == "a"
    assert table.learned() == {}


@pytest.mark.parametrize("names", [[], ["a", ""], ["a", "b", "a"], {1: "a", 2: "a"}], ids=str)
def test_bad_names_are_refused(names: Any) -> None:
    with pytest.raises(ConfigurationError):
        SourceTable(names)


def _agreed(found: list[dict[int, str]]) -> dict[int, str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    table = SourceTable()
    agree_on_names(table, found[dist.get_rank()], dist.group.WORLD)
    return table.learned()


@pytest.mark.distributed
def test_ranks_agree_on_what_any_of_them_found() -> None:
    found = [{1: "web", 2: "caf\u00e9"}, {1: "other", 5: "x" * 500}]
    expected = {1: "web", 2: "caf\u00e9", 5: "x" * 120}
    assert run_ranks(_agreed, 2, found) == [expected, expected]


def _contradicted(found: list[dict[int, str]]) -> tuple[list[str], dict[int, str]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    table = SourceTable()
    return agree_on_names(table, found[dist.get_rank()], dist.group.WORLD), table.learned()


@pytest.mark.distributed
def test_contradictions_between_ranks_are_the_same_everywhere() -> None:
    """Ranks that number their sources by themselves."""
    first, second = run_ranks(_contradicted, 2, [{0: "web", 1: "code"}, {0: "code", 1: "web"}])
    assert first == second
    assert first == (["'code' for the ids 1 and 0", "'web' for the ids 0 and 1"], {0: "web", 1: "code"})


def test_one_rank_agrees_with_itself() -> None:
    table = SourceTable()
    agree_on_names(table, {4: "a"}, None)
    assert table.learned() == {4: "a"}
