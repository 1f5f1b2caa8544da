"""``--print_layout``: the map of a run for machines that are not here."""

from __future__ import annotations

import pytest
import yaml

from lightning_longctx.cli import main


def call(capsys: pytest.CaptureFixture[str], strategy: object, *flags: str, **trainer: object) -> tuple[int, str, str]:
    config = {
        "trainer": {"accelerator": "cpu", "devices": 8, "num_nodes": 2, "strategy": strategy, **trainer},
        "model": {"class_path": "tests.cli.toys.ToyModel"},
        "data": {"class_path": "tests.cli.toys.ToyData"},
    }
    code = main(["fit", f"--config={yaml.safe_dump(config)}", *flags, "--print_layout"])
    out, err = capsys.readouterr()
    return code, out, err


def test_sixteen_ranks_on_two_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 4}}
    code, out, _ = call(capsys, strategy, "--trainer.strategy.data_parallel_replicate_size=2")
    assert code == 0
    assert "16 processes on 2 nodes: data_parallel_replicate 2 x data_parallel_shard 2 x sequence_parallel 4" in out
    assert len(out.splitlines()) == 2 + 16
    assert "warning" not in out


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        ("ddp", 8, "not of 'ddp'"),
        ("longctx_fsdp", "auto", "needs `trainer.devices` as a number"),
        ({"class_path": "LongContextFSDPStrategy", "init_args": {"sequence_parallel_size": 3}}, 8, "16 / 3 leaves 1"),
    ],
)
def test_what_has_no_map_is_told(
    strategy: object, devices: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, strategy, devices=devices)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("devices", [[0, 1], "0,1", "2"], ids=str)
def test_a_registered_name_has_the_defaults(devices: object, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "longctx_fsdp", devices=devices, num_nodes=1)
    assert code == 0
    assert "data_parallel_shard 2 x sequence_parallel 1" in out
