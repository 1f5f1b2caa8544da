"""``MoERouterHeatmap`` in a Trainer: windows, resume, loggers, files, and what is refused."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn

from lightning_longctx.callbacks import MoERouterHeatmap
from lightning_longctx.errors import ConfigurationError
from tests.callbacks.moe import CHECKPOINTING, EXPERTS, LAYERS, MoEModule, recount
from tests.callbacks.toy import MemoryLogger, ToyLM, loader, make_batch, make_trainer
from tests.helpers.pool import run_ranks

BATCHES = [make_batch(seed, 5, padding=seed % 5) for seed in range(12)]


def fit(
    callback: MoERouterHeatmap,
    directory: Path,
    module: Any = None,
    batches: Sequence[Any] = BATCHES,
    ckpt_path: Any = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Trainer:
    settings = {"default_root_dir": directory, "limit_val_batches": 0, **settings}
    trainer = make_trainer([callback, *callbacks], **settings)
    module = module or MoEModule()
    trainer.fit(module, loader(batches), loader(batches[:2]), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def table(directory: Path) -> dict[tuple[int, int], list[list[int]]]:
    """Tokens per layer and expert of each window, from the file."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    with next(directory.rglob("tokens_per_expert.csv")).open() as file:
        for row in csv.DictReader(file):
            window = found.setdefault((int(row["first_step"]), int(row["last_step"])), [[] for _ in range(LAYERS)])
            window[int(row["layer"].removeprefix("layer_"))].append(int(row["tokens"]))
    return found


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_count_each_token_of_their_steps_once(tmp_path: Path, checkpointing: str, accumulate: int) -> None:
    callback = MoERouterHeatmap(every_n_steps=2)
    trainer = fit(callback, tmp_path, MoEModule(checkpointing), accumulate_grad_batches=accumulate)
    size = 2 * accumulate
    steps = range(1, trainer.global_step + 1, 2)
    assert table(tmp_path) == {
        (first, first + 1): recount(BATCHES[number * size : (number + 1) * size])[0]
        for number, first in enumerate(steps)
    }
    _, padding = recount(BATCHES[:size])
    choices = size * 16 * 2 * LAYERS
    assert trainer.logger.column("moe/padding_share")[0] == pytest.approx(padding / choices)


def test_what_is_left_at_the_end_is_a_window(tmp_path: Path) -> None:
    fit(MoERouterHeatmap(every_n_steps=5), tmp_path)
    assert list(table(tmp_path)) == [(1, 5), (6, 10), (11, 12)]
    folder = tmp_path / "moe_router"
    names = sorted(path.name for path in folder.glob("*.png"))
    assert names == [
        "heatmap_over_time.png",
        "steps_00000001-00000005.png",
        "steps_00000006-00000010.png",
        "steps_00000011-00000012.png",
    ]
    with Image.open(folder / names[0]) as picture:
        assert picture.width > 300


def test_validation_does_not_count(tmp_path: Path) -> None:
    """torchtitan#4148: forwards of an evaluation leak into the counts."""
    fit(MoERouterHeatmap(4), tmp_path, limit_val_batches=2, val_check_interval=2, num_sanity_val_steps=2)
    assert table(tmp_path)[(1, 4)] == recount(BATCHES[:4])[0]


def test_loss_and_weights_are_those_without_the_callback(tmp_path: Path) -> None:
    plain, counted = MoEModule("selective", lr=0.1), MoEModule("selective", lr=0.1)
    make_trainer([], limit_val_batches=0).fit(plain, loader(BATCHES), loader(BATCHES))
    fit(MoERouterHeatmap(3), tmp_path, counted)
    for (name, one), (_, other) in zip(plain.named_parameters(), counted.named_parameters(), strict=True):
        assert torch.equal(one, other), name


class _Save(Callback):
    """A stock checkpoint after a step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def goes_on_with_its_window(strategy: str) -> bool:
    """Whether a resume in the working folder does."""
    saved, second = Path("middle.ckpt"), MoERouterHeatmap(4)
    batches = [make_batch(seed, 5, padding=1 + seed % 4) for seed in range(12)]
    fit(MoERouterHeatmap(4), Path("a"), batches=batches, callbacks=[_Save(6, saved)], strategy=strategy)
    whole = table(Path("a"))
    # Loaders in these tests have no state, so the rest of the data is given.
    settings: Any = {"ckpt_path": saved, "max_epochs": 2, "max_steps": 12, "strategy": strategy}
    fit(second, Path("b"), batches=batches[6:], **settings)
    assert table(Path("b")) == {window: counts for window, counts in whole.items() if window[1] > 6}
    assert second.state_dict()["history"]["steps"] == [4, 8, 12]
    return True


def sharded_goes_on_with_its_window() -> bool:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        return goes_on_with_its_window("longctx_fsdp")


def test_a_resume_in_the_middle_of_a_window_goes_on_with_it() -> None:
    assert goes_on_with_its_window("auto")


@pytest.mark.distributed  # in the pool: process groups that this process is left with harm those that later tests fork
def test_so_does_one_of_a_strategy_that_loads_checkpoints_after_the_start_of_the_fit() -> None:
    assert run_ranks(sharded_goes_on_with_its_window, 1) == [True]


def test_the_strip_and_the_starved_go_on_after_a_resume(tmp_path: Path) -> None:
    saved = tmp_path / "middle.ckpt"
    whole, second = MoERouterHeatmap(2, dead_after_windows=None), MoERouterHeatmap(2, dead_after_windows=5)
    fit(whole, tmp_path / "a", _DeadExpert(), callbacks=[_Save(7, saved)])
    settings: Any = {"batches": BATCHES[7:], "ckpt_path": saved, "max_epochs": 2, "max_steps": 12}
    with pytest.warns(UserWarning, match="for 5 windows, until step 10"):
        fit(second, tmp_path / "b", _DeadExpert(), **settings)
    first, other = whole.state_dict(), second.state_dict()
    assert first["history"]["steps"] == [2, 4, 6, 8, 10, 12]
    assert torch.equal(first["history"].pop("extremes"), other["history"].pop("extremes"))
    assert first["history"] == other["history"]
    pictures = [(tmp_path / name / "moe_router" / "heatmap_over_time.png").read_bytes() for name in "ab"]
    assert pictures[0] == pictures[1]


def test_a_checkpoint_of_other_layers_starts_a_new_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = MoERouterHeatmap(4)
    fit(callback, tmp_path / "a", callbacks=[_Save(6, tmp_path / "middle.ckpt")])
    other = MoERouterHeatmap(4, routers="layers.0.gate")
    settings: Any = {"batches": BATCHES[6:], "max_epochs": 2, "max_steps": 12}
    fit(other, tmp_path / "b", ckpt_path=tmp_path / "middle.ckpt", **settings)
    assert "other layers of experts" in caplog.text
    assert other.state_dict()["history"]["first_step"] == 7


def test_what_is_left_at_the_end_is_logged_at_the_last_step(tmp_path: Path) -> None:
    """It was one further, where no other key has a value."""
    logger: Any = fit(MoERouterHeatmap(5), tmp_path).logger
    assert [step for step, row in logger.rows if "moe/max_vio" in row] == [4, 9, 11]


class _Failing(MoEModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("a bug of the user")
        return super().training_step(batch, batch_idx)


def test_an_error_leaves_no_hook_and_the_next_fit_is_right(tmp_path: Path) -> None:
    """Lightning skips `teardown` after an error."""
    callback, module = MoERouterHeatmap(12), _Failing()
    with pytest.raises(RuntimeError, match="bug of the user"):
        fit(callback, tmp_path / "a", module)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())
    assert all("_longctx_router_recorder" not in vars(part) for part in module.modules())
    fit(callback, tmp_path / "b")
    assert table(tmp_path / "b") == {(1, 12): recount(BATCHES)[0]}


def test_a_second_fit_counts_once_and_leaves_no_hook(tmp_path: Path) -> None:
    callback, module = MoERouterHeatmap(12), MoEModule()
    fit(callback, tmp_path / "a", module)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in module.modules())
    fit(callback, tmp_path / "b", module)
    assert table(tmp_path / "a") == table(tmp_path / "b")


def test_numbers_reach_loggers_callbacks_and_other_code(tmp_path: Path) -> None:
    callback = MoERouterHeatmap(6, detail="full")
    trainer = fit(callback, tmp_path)
    loads = trainer.logger.column("moe/max_vio")
    assert len(loads) == 2
    assert trainer.callback_metrics["moe/max_vio"].item() == pytest.approx(loads[-1])
    counts = np.array(recount(BATCHES[6:])[0])
    expected = counts.max(1) * EXPERTS / counts.sum(1) - 1
    assert loads[-1] == pytest.approx(expected.max())
    assert trainer.logger.column("moe/max_vio_mean")[-1] == pytest.approx(expected.mean())
    for layer in range(LAYERS):
        assert trainer.logger.column(f"moe/max_vio/layer_{layer:02d}")[-1] == pytest.approx(expected[layer])
    assert [row.tolist() for row in callback.latest.tokens] == counts.tolist()  # type: ignore[union-attr]
    steps = [step for step, row in trainer.logger.rows if "moe/max_vio" in row]
    assert steps == [5, 11]  # the axis on which Lightning logs the sixth and the twelfth step


class _Pictures(MemoryLogger):
    """Takes pictures as W&B's logger does."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[tuple[str, int, str]] = []

    def log_image(self, key: str, images: list[Any], step: int, caption: list[str]) -> None:
        assert all(isinstance(image, Image.Image) for image in images)
        self.pictures.append((key, step, caption[0]))


def test_pictures_reach_loggers_that_take_them(tmp_path: Path) -> None:
    pictures, board = _Pictures(), TensorBoardLogger(tmp_path / "board")
    fit(MoERouterHeatmap(6), tmp_path, logger=[pictures, board])
    assert pictures.pictures == [
        ("moe/expert_load", 5, "steps 1-6"),
        ("moe/expert_load", 11, "steps 7-12"),
        ("moe/expert_load_over_time", 11, "steps 1-12"),
    ]
    written = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events*"))
    assert b"moe/expert_load_over_time" in written


def test_it_works_without_a_logger(tmp_path: Path) -> None:
    fit(MoERouterHeatmap(6), tmp_path, logger=False)
    assert list(table(tmp_path)) == [(1, 6), (7, 12)]


def test_runs_that_share_a_directory_have_a_table_each_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    """Without a logger, and with those of W&B and MLflow, all runs have one directory."""
    settings: Any = {"batches": BATCHES[:6], "logger": False, "max_epochs": 2}
    fit(MoERouterHeatmap(2), tmp_path, max_steps=4, callbacks=[_Save(4, tmp_path / "four.ckpt")], **settings)
    fit(MoERouterHeatmap(3), tmp_path, max_steps=6, **settings)
    assert list(table(tmp_path / "moe_router")) == [(1, 2), (3, 4)]
    assert list(table(tmp_path / "moe_router_1")) == [(1, 3), (4, 6)]
    fit(MoERouterHeatmap(3), tmp_path, max_steps=6, ckpt_path=tmp_path / "four.ckpt", **settings)
    assert list(table(tmp_path / "moe_router_1")) == [(1, 3), (4, 6), (5, 6)]


class _PausedAt(Callback):
    def __init__(self, heatmap: MoERouterHeatmap) -> None:
        self.heatmap = heatmap

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        (self.heatmap.pause if batch_idx in (3, 4) else self.heatmap.resume)()


def test_a_pause_does_not_count(tmp_path: Path) -> None:
    heatmap = MoERouterHeatmap(12)
    make = make_trainer([_PausedAt(heatmap), heatmap], default_root_dir=tmp_path, limit_val_batches=0)
    make.fit(MoEModule(), loader(BATCHES), loader(BATCHES))
    assert table(tmp_path) == {(1, 12): recount(BATCHES[:3] + BATCHES[5:])[0]}


def test_a_window_without_routing_publishes_nothing_and_says_so(tmp_path: Path) -> None:
    heatmap = MoERouterHeatmap(3)
    heatmap.pause()
    with pytest.warns(UserWarning, match="saw no routing"):
        trainer = fit(heatmap, tmp_path)
    assert trainer.logger.column("moe/max_vio") == []
    assert not (tmp_path / "moe_router").exists()


def test_none_switches_it_off(tmp_path: Path) -> None:
    trainer = fit(MoERouterHeatmap(None), tmp_path)
    assert trainer.logger.column("moe/max_vio") == []


class _DeadExpert(MoEModule):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.gate.forward = self._without_the_first(layer.gate)  # type: ignore[method-assign]

    @staticmethod
    def _without_the_first(gate: nn.Module) -> Any:
        def forward(hidden: Tensor) -> Any:
            logits = hidden @ gate.weight.T
            weights, indices = logits[:, 1:].softmax(-1).topk(2, dim=-1)
            return logits, weights, indices + 1

        return forward


def test_an_expert_without_tokens_for_some_windows_is_named_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"for 2 windows, until step 4, .* layer_00 \[0\], layer_01 \[0\]") as caught:
        fit(MoERouterHeatmap(2, dead_after_windows=2), tmp_path, _DeadExpert())
    assert sum("layer_00" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "10"])
def test_other_windows_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps"):
        MoERouterHeatmap(every_n_steps=value)


def test_other_choices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="detail.*brief, full"):
        MoERouterHeatmap(detail="all")  # type: ignore[arg-type]


def test_a_model_without_experts_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must have experts beside a router.*record_router_indices"):
        fit(MoERouterHeatmap(), tmp_path, ToyLM())
    with pytest.warns(UserWarning, match="must have experts"):
        fit(MoERouterHeatmap(on_missing="warn"), tmp_path, ToyLM())


class _Unseen(MoEModule):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.gate, layer.experts = nn.Linear(8, EXPERTS), nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
            layer.forward = self._routed(layer)

    @staticmethod
    def _routed(layer: nn.Module) -> Any:
        return lambda hidden: hidden + layer.gate(hidden).softmax(-1) @ layer.gate.weight


def test_experts_whose_decisions_cannot_be_seen_are_named_after_the_first_batch(tmp_path: Path) -> None:
    module = _Unseen()
    with pytest.raises(ConfigurationError, match=r"nothing from layers\.0, layers\.1, layers\.2 \(3 in all\)"):
        fit(MoERouterHeatmap(), tmp_path, module)
    assert module.trainer.global_step <= 1


def read_top2(module: nn.Module, output: Any) -> Tensor:
    """A user's own reader."""
    return output.topk(2, dim=-1).indices


def test_a_reader_of_ones_own_and_a_pattern(tmp_path: Path) -> None:
    module = _Unseen()
    fit(MoERouterHeatmap(12, routers="layers.*.gate", extract=read_top2), tmp_path, module)
    assert [sum(row) for row in table(tmp_path)[(1, 12)]] == [sum(row) for row in recount(BATCHES)[0]]


def wrong_reader(module: nn.Module, output: Any) -> Tensor:
    """Indices that are no experts."""
    return output[2] + 7


def test_an_index_that_is_no_expert_names_layer_and_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"layers\.0\.gate.*0 to 4.*such as 1[01]"):
        fit(MoERouterHeatmap(2, routers="layers.*.gate", extract=wrong_reader), tmp_path)


def test_ordinary_batches_use_their_attention_mask(tmp_path: Path) -> None:
    """transformers#28505: a padded batch [B, S] without packing."""

    class Padded(MoEModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch["input_ids"].reshape(1, -1)).square().mean()

    batch = {"input_ids": torch.arange(32).reshape(2, 16) % 11, "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    batch["attention_mask"][0, 8:] = 0
    fit(MoERouterHeatmap(1), tmp_path, Padded(), [batch])
    assert [sum(row) for row in table(tmp_path)[(1, 1)]] == [48] * LAYERS
