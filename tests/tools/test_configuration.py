"""The layout that a configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_longctx.errors import ConfigurationError
from lightning_longctx.tools.configuration import layout_of


def _settings(devices: Any, sp_size: int | None = None, num_nodes: int = 1) -> dict[str, Any]:
    strategy = (
        "ddp" if sp_size is None else {"class_path": "x.Strategy", "init_args": {"sequence_parallel_size": sp_size}}
    )
    return {"trainer": {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (_settings(8), (8, 1)),
        (_settings("8"), (8, 1)),
        (_settings([0, 3]), (2, 1)),
        (_settings("0,3"), (2, 1)),
        (_settings("3,"), (1, 1)),
        (_settings(8, sp_size=4), (2, 4)),
        (_settings(8, sp_size=8, num_nodes=8), (8, 8)),
        (_settings("auto", sp_size=2), (None, 2)),
        (_settings(-1), (None, 1)),
        ({"trainer": {"strategy": {"class_path": "x.Strategy"}}}, (None, 1)),
        ({"trainer": None}, (None, 1)),
        ({}, (None, 1)),
    ],
)
def test_layout(settings: dict[str, Any], layout: tuple[int | None, int]) -> None:
    assert layout_of(settings) == layout


def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigurationError, match=r"3 for 4 devices x 2 nodes = 8 processes"):
        layout_of(_settings(4, sp_size=3, num_nodes=2))
