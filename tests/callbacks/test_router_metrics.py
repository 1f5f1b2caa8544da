"""Numbers of expert load by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_longctx.callbacks.router_history import RouterHistory
from lightning_longctx.callbacks.router_metrics import RouterLoad, violations
from lightning_longctx.callbacks.router_picture import colours, draw_heatmap, draw_history


def load(*counts: list[int], padding: int = 0, dropped: int = 0, last: int = 10) -> RouterLoad:
    labels = tuple(f"layer_{number:02d}" for number in range(len(counts)))
    return RouterLoad(1, last, labels, labels, tuple(torch.tensor(row) for row in counts), padding, dropped)


def test_uniform_routing_is_zero_and_a_collapsed_router_is_experts_minus_one() -> None:
    metrics = load([5, 5, 5, 5]).metrics(full=False)
    assert metrics["moe/max_vio"] == metrics["moe/min_vio"] == metrics["moe/avg_vio"] == metrics["moe/variation"] == 0
    assert metrics["moe/entropy"] == pytest.approx(1)
    collapsed = load([0, 20, 0, 0]).metrics(full=False)
    assert collapsed["moe/max_vio"] == 3
    assert collapsed["moe/min_vio"] == -1
    assert collapsed["moe/dead_experts"] == 3
    assert collapsed["moe/entropy"] == 0


def test_a_two_by_two_example_over_layers() -> None:
    """vllm#36304: a mean over the wrong axis reports perfect balance; here each layer is unfair the other way round."""
    metrics = load([30, 10], [10, 30]).metrics(full=True)
    assert metrics["moe/max_vio"] == metrics["moe/max_vio_mean"] == 0.5
    assert metrics["moe/max_vio/layer_00"] == metrics["moe/max_vio/layer_01"] == 0.5
    assert metrics["moe/min_vio"] == -0.5
    assert metrics["moe/avg_vio"] == 0.5
    assert metrics["moe/variation"] == 0.5
    assert metrics["moe/tokens_max"] == 30
    assert metrics["moe/tokens_min"] == 10


def test_the_worst_layer_and_the_mean() -> None:
    metrics = load([4, 4], [6, 2], padding=4, dropped=2).metrics(full=False)
    assert (metrics["moe/max_vio"], metrics["moe/max_vio_mean"]) == (0.5, 0.25)
    assert metrics["moe/padding_share"] == pytest.approx(4 / 22)
    assert metrics["moe/dropped_share"] == pytest.approx(2 / 18)
    assert len(metrics) == 18


def test_a_silent_layer_is_no_data_and_not_minus_one() -> None:
    metrics = load([4, 4], [0, 0]).metrics(full=True)
    assert metrics["moe/min_vio"] == metrics["moe/min_vio_mean"] == 0
    assert "moe/max_vio/layer_01" not in metrics
    assert all(math.isnan(value) for value in violations(torch.tensor([0, 0])))


def test_colours_do_not_depend_on_the_data() -> None:
    shares = np.array([1.0, 0.5, 2.0, 4.0, 8.0, 30.0, 0.01, 0.0, math.nan])
    fair, half, twice, four, eight, beyond, little, none, nothing = colours(shares - 1).tolist()
    assert eight == beyond  # the scale ends at eight times the fair share
    assert len({tuple(colour) for colour in (fair, half, twice, four, eight, little, none, nothing)}) == 8
    assert max(fair) - min(fair) == 0  # neutral
    assert sum(none) < sum(little) / 2  # an expert without a token is not only somewhat bluer


@pytest.mark.parametrize(("layers", "experts"), [(2, 4), (61, 256), (1, 2)])
def test_pictures_are_readable_at_any_size(layers: int, experts: int) -> None:
    window = load(*[[1] * experts for _ in range(layers)])
    picture = draw_heatmap(window)
    assert 300 < picture.width < 1300
    assert 150 < picture.height < 900
    assert len(picture.getcolors(2**20) or ()) > 10  # cells, text, scale


def history_of(windows: list[RouterLoad]) -> RouterHistory:
    history = RouterHistory(windows[0].labels)
    for window in windows:
        history.add(window)
    return history


def test_the_history_shows_every_window_and_cells_show_their_value() -> None:
    picture = draw_history(history_of([load([1, 7], [4, 4], last=step) for step in (10, 20, 30)]))
    found = {colour for _, colour in picture.getcolors(2**20) or ()}
    for value in (0.75, -0.75, 0.0):  # busiest, fewest, fair
        assert tuple(colours(np.array([value]))[0].tolist()) in found


def test_a_long_history_is_thinned_evenly_and_goes_on_from_a_state() -> None:
    history = history_of([load([1, 7], last=step) for step in range(1, 1601)])
    assert history.steps == list(range(1, 1600, 4))
    assert draw_history(history).width < 1300
    other = RouterHistory(history.labels)
    other.load_state_dict(history.state_dict())
    for step in range(1601, 1610):
        history.add(load([3, 5], last=step))
        other.add(load([3, 5], last=step))
    assert other.steps == history.steps
    assert (other.first_step, other.windows) == (1, 1609)
    assert all(torch.equal(one, two) for one, two in zip(other.extremes, history.extremes, strict=True))


def test_experts_that_a_layer_does_not_have_do_not_look_like_a_fair_share() -> None:
    pixels = np.asarray(draw_heatmap(load([4] * 8, [4] * 4)))
    row = pixels[34 + 48 + 24, 90 : 90 + 8 * 48]  # through the middle of the second layer
    there, missing = row[: 4 * 48], row[4 * 48 :]
    assert len(np.unique(there, axis=0)) == 1
    assert len(np.unique(missing, axis=0)) == 2
