"""The offload benchmark: its simulation equals a real run, and offload moves what arithmetic says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import offload_time
from benchmarks.offload import WAYS, Shape, analytic, main, measure

SMALL = Shape(layers=3, hidden=64, inner=224, heads=4, kv_heads=2)
TOKENS = 96


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("tiles", [False, 3])
def test_the_simulated_peak_is_the_real_one(checkpointing: str, tiles: bool | int) -> None:
    fake = measure(SMALL, TOKENS, checkpointing, "none", tiles)
    real = measure(SMALL, TOKENS, checkpointing, "none", tiles, simulated=False)
    assert fake == real


@pytest.mark.parametrize(("tokens", "layers"), [(16384, 2), (32768, 5)])
def test_bytes_moved_are_the_analytic_number(tokens: int, layers: int) -> None:
    shape = Shape(layers=layers)
    found = measure(shape, tokens, "full", "boundary", False)
    assert found.moved == found.host == analytic(shape, tokens) == (layers - 1) * tokens * 4096 * 2


def test_each_part_lowers_the_peak_or_what_is_kept() -> None:
    shape, tokens = Shape(layers=4), 131072  # shorter, and gradients of weights set the peak
    figures = {name: measure(shape, tokens, *WAYS[name]) for name in WAYS}
    plain, offload = figures["checkpointing"], figures["checkpointing, offload boundary"]
    both = figures["checkpointing, offload boundary, tiles"]
    block = tokens * shape.hidden * 2
    assert plain.kept - offload.kept == (shape.layers - 2) * block, "all but the newest, and the input of the body"
    assert offload.peak < plain.peak - block / 2
    assert both.peak < offload.peak - 3 * tokens * shape.inner * 2, "one tile's gate, up and product"
    everything = figures["offload all alone"]
    assert everything.moved < 0.75 * figures["PyTorch's save_on_cpu alone"].moved, "weights and second copies"
    policy = figures["selective, offload policy"]
    assert policy.moved == 2 * (shape.layers - 1) * block + policy_extra(shape, tokens)


def policy_extra(shape: Shape, tokens: int) -> int:
    """The logarithms of sums that the attention kernel returns: float32 for each head and token."""
    return (shape.layers - 1) * tokens * shape.heads * 4


def test_a_run_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "figures.json"
    assert main(["--tokens", "8192", "--layers", "2", "--json", str(page)]) == 0
    assert "equal to the analytic number" in capsys.readouterr().out
    assert set(json.loads(page.read_text())) == {f"8192 {name}" for name in WAYS}


def test_ways_take_turns_and_agree_in_every_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "times.json"
    arguments = ["--device", "cpu", "--tokens", "64", "--layers", "3", "--hidden", "128", "--turns", "2"]
    assert offload_time.main([*arguments, "--json", str(page)]) == 0
    (found,) = json.loads(page.read_text()).values()
    assert set(found) == set(offload_time.WAYS)
    assert all(row["equal"] and row["ratio"] > 0 for row in found.values())
    assert "| async |" in capsys.readouterr().out
