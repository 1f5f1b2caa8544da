"""Resume on several processes: exact in the same layout, resharded onto others, and what the rules say besides."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx.callbacks.checkpoint_resume import agree_on_last
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.scores import read_scores
from tests.callbacks.checkpoint_toy import Recorder, assert_same, fit
from tests.helpers.pool import RankError, run_ranks

pytestmark = pytest.mark.distributed


def _fit(folder: str, steps: int, ckpt_path: str | None, world: int, sp: int | None, options: dict[str, Any]) -> Any:
    strategy = "ddp" if world > 1 else "auto"
    result = fit(folder, steps, ckpt_path, devices=world, sp=sp, strategy=strategy, **options)
    result["data"] = sorted(key for _, keys in result["notes"] for key in map(tuple, keys) if key[0] >= 0)
    return result


@pytest.mark.parametrize(("sp", "world"), [(1, 2), (2, 2), (None, 2)], ids=["FSDP2 dp2", "FSDP2 sp2", "DDP"])
def test_five_and_five_are_ten_on_two_ranks(tmp_path: Path, sp: int | None, world: int) -> None:
    options = {"accumulate": 2}
    whole = run_ranks(_fit, world, str(tmp_path / "whole"), 10, None, world, sp, options)
    before = run_ranks(_fit, world, str(tmp_path / "parts"), 5, None, world, sp, options)
    after = run_ranks(_fit, world, str(tmp_path / "parts"), 10, "last", world, sp, options)
    for rank in range(world):
        assert before[rank]["notes"] + after[rank]["notes"] == whole[rank]["notes"]
        assert_same(after[rank], whole[rank])


class _Alone(Recorder):
    """Only the first rank knows the score, as where it alone generates text."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("score", 1.0, sync_dist=True, rank_zero_only=True, batch_size=1)


def _scored(folder: str) -> tuple[list[int], int]:
    data = {"validation_sources": {"a": [{"text": "words"}] * 4}}
    settings: dict[str, Any] = {"checkpoint": {"monitor": "score"}, "options": {"timeout": timedelta(seconds=5)}}
    settings |= {"strategy": "ddp", "devices": 2, "val_check_interval": 2, "limit_val_batches": 1}
    fit(folder, 4, data=data, module=_Alone(), **settings)
    return [found.commit.step for found in scan(folder) if found.commit], len(read_scores(Path(folder)))


def test_a_score_that_one_rank_alone_has_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The first rank waited in its save for the others, which went on to the next step."""
    assert run_ranks(_scored, 2, str(tmp_path / "c")) == [([4, 2], 2)] * 2


def _loaded(folder: str, world: int, sp: int | None) -> Any:
    """Resume and train nothing more: what was loaded."""
    return _fit(folder, 4, "last", world, sp, {})


@pytest.mark.parametrize(("sp", "world"), [(1, 1), (1, 4), (2, 2), (2, 4), (4, 4), (None, 2)])
def test_weights_and_optimizer_onto_other_layouts(tmp_path: Path, sp: int | None, world: int) -> None:
    """torchtitan#816, #811, #409: another number of ranks. Saved by two data-parallel ranks."""
    saved = run_ranks(_fit, 2, str(tmp_path / "c"), 4, None, 2, 1, {})[0]
    for loaded in run_ranks(_loaded, world, str(tmp_path / "c"), world, sp):
        assert loaded["notes"] == []
        assert_same(loaded, saved)


@pytest.mark.parametrize(("first", "then"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (4, 2))])
def test_data_is_dealt_anew_and_none_is_lost(tmp_path: Path, first: tuple[int, int], then: tuple[int, int]) -> None:
    """torchtitan#291: all ranks got one state. Every document of the epoch once, over both runs."""
    documents = [{"text": "words " * (n % 7 + 1)} for n in range(60)]
    options = {"max_epochs": 1, "data": {"sources": {"a": documents}, "loading": {"on_uneven_end": "pad"}}}
    world, sp = first
    before = run_ranks(_fit, world, str(tmp_path / "c"), 3, None, world, sp, options)
    world, sp = then
    after = run_ranks(_fit, world, str(tmp_path / "c"), -1, "last", world, sp, options)
    seen: list[Any] = []
    for results, size in ((before, first[1]), (after, then[1])):
        for result in results[::size]:  # ranks that share a row note the same documents
            seen += result["data"]
    assert sorted({key for key in seen}) == [(0, n) for n in range(60)]
    assert len(seen) == 60


def test_the_tokens_of_a_step_stay_when_ranks_change(tmp_path: Path) -> None:
    """Two ranks with 2 micro-batches, then one with 4: the first step after the resume has four again."""
    options = {"data": {"global_batch_tokens": 256, "max_seq_len": 64}}
    before = run_ranks(_fit, 2, str(tmp_path / "c"), 3, None, 2, 1, options)
    after = run_ranks(_fit, 1, str(tmp_path / "c"), 6, "last", 1, 1, options)
    assert [len(result["notes"]) for result in before] == [6, 6]
    assert len(after[0]["notes"]) == 3 * 4
    assert after[0]["step"] == 6
    found = scan(tmp_path / "c")[0]
    assert found.commit is not None
    assert found.commit.accumulate == 4


def _first_draw(folder: str, world: int) -> float:
    class Draw(Callback):
        drawn = 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            self.drawn = self.drawn or float(torch.rand(1))

    draw = Draw()
    fit(folder, 6, "last", devices=world, sp=1, callbacks=[draw])
    return draw.drawn


def test_random_numbers_start_from_new_seeds_in_another_layout(tmp_path: Path) -> None:
    run_ranks(_fit, 2, str(tmp_path / "c"), 5, None, 2, 1, {})
    draws = run_ranks(_first_draw, 4, str(tmp_path / "c"), 4)
    assert len(set(draws)) == 4, "no two ranks draw the same numbers"


def _last_of(found: list[str]) -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    trainer.strategy.setup_environment()
    agree_on_last(trainer, found[trainer.global_rank])


@pytest.mark.distributed
def test_ranks_that_do_not_see_the_same_store_are_told() -> None:
    """One rank loaded, and waited for the other, which began anew, until the time limit."""
    run_ranks(_last_of, 2, ["step-00000006-aaaaaaaa", "step-00000004-bbbbbbbb"])  # one is damaged: the first rank knows
    run_ranks(_last_of, 2, ["", ""])
    with pytest.raises(RankError, match="a store that all nodes share") as raised:
        run_ranks(_last_of, 2, ["step-00000006-aaaaaaaa", ""])
    assert len(raised.value.causes) == 2
