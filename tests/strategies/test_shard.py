"""Which modules become units, and which parameters stay whole."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_longctx import ConfigurationError
from lightning_longctx.strategies.shard import _check_ties, find_blocks, find_unsharded
from tests.strategies.test_units import Tower


@pytest.mark.parametrize(
    ("names", "count"),
    [
        (["layers.*"], 2),
        (["layers.0.experts.*"], 6),
        (["*.experts.*"], 12),
        (["Experts", "small.*"], 11),
        (["small"], 0),
    ],
)
def test_blocks_by_path_and_class(names, count):
    if count:
        assert len(find_blocks(Tower(), names)) == count
    else:  # without a dot or a star it is the name of a class
        with pytest.raises(ConfigurationError, match="must name classes of submodules or match their paths"):
            find_blocks(Tower(), names)


def test_what_stands_before_a_path_need_not_be_written():
    whole = nn.ModuleDict({"model": Tower()})
    assert find_blocks(whole, ["layers.*"]) == list(whole["model"].layers)


def test_no_block_lies_inside_another():
    tower = Tower()
    assert find_blocks(tower, ["layers.*", "Linear"]) == [*tower.small, *tower.layers]


def test_whole_parameters_by_pattern():
    tower = Tower()
    assert set(find_unsharded(tower, ["small.0.*", "layers.*.bias"])) == {
        "small.0.weight",
        "small.0.bias",
        *(f"layers.{layer}.experts.{expert}.bias" for layer in range(2) for expert in range(6)),
    }
    assert find_unsharded(tower, []) == {}
    with pytest.raises(ConfigurationError, match="unsharded_parameters.*must match names of parameters.*'norm'"):
        find_unsharded(tower, ["norm"])


def test_a_parameter_that_two_units_share_is_refused():
    tower = Tower()
    tower.layers[1].experts[3].weight = tower.layers[0].experts[0].weight
    with pytest.raises(ConfigurationError, match=r"layers\.0\.experts\.0\.weight and layers\.1\.experts\.3\.weight"):
        _check_ties(tower, find_blocks(tower))
    tower.layers[1].experts[3].weight = tower.layers[1].experts[0].weight
    _check_ties(tower, find_blocks(tower))  # inside one unit FSDP2 keeps the tie
