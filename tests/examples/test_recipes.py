"""Every YAML in ``examples/``: two steps on CPU, with nothing changed but sizes, and a plan of the large ones.

A recipe for many GPUs runs as it is written, on files of the names that it has: only the number of devices and the
lengths are others, given as flags. ``longctx plan`` reads the very file, and says that it fits what it is written for.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_longctx.cli import main
from tests.examples.places import write_documents, write_shapes, write_tiny_models
from tests.examples.runs import EXAMPLES, LIMIT, column, longctx, metrics
from tests.helpers.processes import start

_CPU = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.log_every_n_steps=1"]
_TWO = [*_CPU, "--trainer.num_nodes=1", "--trainer.devices=2", "--data.loading.num_workers=1"]
_SHARED = [*_TWO, "--trainer.strategy.init_args.sequence_parallel_size=2", "--data.global_batch_tokens=4K"]

#: The flags with which each one runs here. What is missing runs as it stands, for two steps.
RECIPES: dict[str, list[str]] = {
    "chat": [*_TWO, "--data.max_seq_len=1K", "--data.global_batch_tokens=4K", "--trainer.val_check_interval=2"],
    "export_hf": ["--trainer.max_steps=2"],
    "long1m": [*_CPU, "--data.max_seq_len=8K"],
    "moe": [*_SHARED, "--data.max_seq_len=1K"],
    "preemption": ["--trainer.max_steps=2"],
    "pretrain_512k": [*_SHARED, "--data.max_seq_len=2K"],
    "quickstart": ["--trainer.max_steps=2"],
}

#: Memory of a device and of its node in GiB, as the first line of each recipe says.
HARDWARE = {"chat": (80, 1024), "long1m": (80, 128), "moe": (80, 1024), "pretrain_512k": (80, 1024)}


def recipe(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return found


def test_every_recipe_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_begins_with_one_sentence_and_its_command(name: str) -> None:
    first, *rest = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert first.endswith((".", ":")) or not rest[0].startswith("#  ")
    assert any(f"longctx fit --config examples/{name}.yaml" in line or "launch/" in line for line in rest)


def test_the_words_of_a_recipe_are_in_its_plan() -> None:
    for name, (device, _) in HARDWARE.items():
        assert f"{device} GB" in (EXAMPLES / f"{name}.yaml").read_text().splitlines()[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files under the names that the recipes use."""
    folder = tmp_path_factory.mktemp("recipes")
    write_documents(folder)
    write_tiny_models(folder)
    return folder


@pytest.fixture
def inside(place: Path, tmp_path: Path) -> Path:
    """An empty folder with links to those files: a run writes where it stands."""
    for item in place.iterdir():
        (tmp_path / item.name).symlink_to(item)
    return tmp_path


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", RECIPES)
def test_two_steps(name: str, inside: Path) -> None:
    longctx(inside, "fit", "--config", str(EXAMPLES / f"{name}.yaml"), *RECIPES[name])
    losses = column(inside, "train/loss")
    assert len(losses) == 2
    assert all(0 < loss < 8 for loss in losses)
    _check_what_it_leaves(name, inside, metrics(inside))


def _check_what_it_leaves(name: str, folder: Path, rows: list[dict[str, str]]) -> None:
    """What each recipe is there for."""
    keys = {key for row in rows for key, value in row.items() if value}
    if name == "chat":
        targets, tokens = (max(column(folder, f"train/{kind}_tokens")) for kind in ("target", "source"))
        assert targets < 0.6 * tokens, "prompts are masked"
        assert column(folder, "data/source_fill")[-1] > 1, "a row has more tokens than its budget of targets"
        assert "val/loss" in keys
        assert list((folder / "Qwen3-8B-chat").glob("*.safetensors"))
    elif name == "moe":
        assert {"moe/max_vio", "channel_loss/web", "channel_loss/code", "channel_loss/books"} <= keys
        assert list((folder / "checkpoints" / "moe").glob("step-*"))
    elif name == "pretrain_512k":
        assert {"channel_loss/books", "channel_loss/code"} <= keys
        assert list((folder / "checkpoints" / "llama-512k").glob("step-*"))
    elif name == "long1m":
        assert max(column(folder, "offload/gib_out")) > 0, "activations were moved"
    elif name == "export_hf":
        _check_export(folder)


def _check_export(folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    longctx(folder, "checkpoint", "export", "checkpoints/export", "--to", "hf", "--output", "again")
    (file,) = (folder / "again").glob("*.safetensors")
    weights = model.state_dict()
    for name, value in load_file(file).items():
        assert value.equal(weights[name]), f"{name} differs between the two ways to export"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_preempted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The recipe as it stands: stopped from outside once it trains, and started again by the same words."""
    words = ["fit", "--config", str(EXAMPLES / "preemption.yaml"), "--trainer.max_steps=12"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    longctx(whole, *words)
    process = start([sys.executable, "-m", "lightning_longctx", *words], parts)
    deadline = time.monotonic() + LIMIT
    while not list(parts.glob("checkpoints/preemption/step-*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT)
    done = column(parts, "train/loss")
    assert 10 <= len(done) < 12, printed
    longctx(parts, *words)
    assert column(parts, "train/loss") == column(whole, "train/loss")
    assert column(parts, "train/target_tokens") == column(whole, "train/target_tokens")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", HARDWARE)
def test_a_large_recipe_fits_its_hardware(name: str, tmp_path: Path) -> None:
    """On a laptop with the documents' place and ``config.json`` alone: no weights, no GPU."""
    write_documents(tmp_path)
    write_shapes(tmp_path)
    device, host = HARDWARE[name]
    words = ["--config", str(EXAMPLES / f"{name}.yaml"), "--device-gb", str(device), "--host-gb", str(host)]
    assert main(["plan", *words, "--brief", "--json", "plan.json"]) == 0
    found = json.loads(Path("plan.json").read_text())
    assert found["facts"]["smallest_fit"] == []
    trainer = recipe(name)["trainer"]
    assert found["facts"]["world_size"] == trainer["devices"] * trainer.get("num_nodes", 1)
