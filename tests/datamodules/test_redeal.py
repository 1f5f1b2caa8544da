"""Another number of data-parallel ranks: what remains is dealt anew, none lost, none twice, as often as one likes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from lightning_longctx.datamodules.cursors import Place, Share
from lightning_longctx.datamodules.mixers import open_mixer
from lightning_longctx.datamodules.mixing import SequenceSettings, SourceState
from lightning_longctx.datamodules.redeal import redeal, remains
from lightning_longctx.datamodules.row_state import RowState
from lightning_longctx.datamodules.sources import Source
from tests.datamodules.test_mixing import _drive, _sources

Key = tuple[str, int, int]  # source, pass, number


def _advance(
    sources: list[Source], state: RowState, count: int | None, ahead: int, **settings: Any
) -> tuple[list[Key], RowState]:
    """Draw ``count`` documents on one rank, and give the state after them as it is saved."""
    states = [state.sources.get(source.name, SourceState()) for source in sources]
    share = Share(state.dp_rank, state.dp_size)
    mixer = open_mixer(sources, SequenceSettings(**settings), share, states, state.count)
    keys = []
    for drawn in islice(_drive(mixer, sources, ahead), count):
        keys.append((sources[drawn.source_id].name, drawn.passes, drawn.draw.documents[0].number))
    found, documents = mixer.state()
    by_name = {source.name: one for source, one in zip(sources, found, strict=True)}
    saved = RowState(dp_rank=state.dp_rank, dp_size=state.dp_size, sources=by_name, count=documents)
    return keys, RowState.from_plain(saved.to_plain([False]))


@pytest.mark.parametrize("mixing", ["sample", "token"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_layouts_gives_each_document_once(mixing: Any, stream: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    sources = _sources({"a": (130, 1.0), "b": (60, 3.0), "c": (5, 0.5)}, stream)
    states = [RowState()]
    keys: list[Key] = []
    for size in (*random.integers(1, 6, 5).tolist(), 3):
        states = [redeal(states, rank, size, mixing) for rank in range(size)]
        for rank in range(size):
            count = None if size == 3 and len(keys) > 150 else int(random.integers(0, 25))
            found, states[rank] = _advance(sources, states[rank], count, int(random.integers(1, 9)), mixing=mixing)
            keys += found
    states = [redeal(states, rank, 2, mixing) for rank in range(2)]
    for state in states:
        keys += _advance(sources, state, None, 5, mixing=mixing)[0]
    assert sorted(keys) == [(name, 0, n) for name, count in (("a", 130), ("b", 60), ("c", 5)) for n in range(count)]


@pytest.mark.parametrize("mixing", ["sample", "token"])
@pytest.mark.parametrize("stream", [False, True])
def test_passes_go_on_where_ranks_are_passes_apart(mixing: Any, stream: bool) -> None:
    sources = _sources({"a": (10, 1.0), "b": (7, 1.0)}, stream)
    options = {"mixing": mixing, "stop_mode": "forever"}
    states = [RowState(dp_rank=rank, dp_size=2) for rank in range(2)]
    keys = []
    for rank, count in ((0, 40), (1, 3)):
        found, states[rank] = _advance(sources, states[rank], count, 4, **options)
        keys += found
    keys += _advance(sources, redeal(states, 0, 1, mixing), 60, 1, **options)[0]
    assert len(keys) == len(set(keys)) == 103
    for name, count in (("a", 10), ("b", 7)):
        complete = max(one for source, one, _ in keys if source == name) - 1
        for one in range(complete):
            assert sorted(n for source, p, n in keys if (source, p) == (name, one)) == list(range(count))


def test_the_remains_are_small_where_ranks_stay_close() -> None:
    # Two ranks deal the even and the odd positions; one is four documents of its own ahead of the other.
    states = [SourceState(Place(position=1_000_001, dealt=1_000_001)), SourceState(Place(1_000_008, dealt=1_000_008))]
    found = remains(states)
    assert found.place.position == 1_000_001
    assert found.ahead == (1_000_001, 1_000_003, 1_000_005, 1_000_007)


def test_what_ranks_owe_to_sources_is_shared_by_the_new_ones() -> None:
    states = [
        RowState(dp_rank=rank, dp_size=2, sources={"a": SourceState(credit=credit), "b": SourceState(credit=-credit)})
        for rank, credit in enumerate([30.0, -10.0])
    ]
    found = [redeal(states, rank, 4, "token").sources for rank in range(4)]
    assert [state["a"].credit for state in found] == [5.0] * 4
    assert [state["b"].credit for state in found] == [-5.0] * 4
