"""``MaxTokens``: where a run stops, over resumes and orders of callbacks, and what it costs to know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.callbacks import ExactTokenMean, MaxTokens, TrainingMetrics
from lightning_longctx.callbacks.step_tally import StepTally, TokensSeen
from lightning_longctx.errors import ConfigurationError
from tests.callbacks.host_reads import ReadingSteps, with_host_keys
from tests.callbacks.toy import TOKENS, ToyLM, loader, make_batch, run_fit

TARGETS = [3, 9, 0, 5, 8, 1, 7, 4]
BATCHES = [make_batch(seed, targets) for seed, targets in enumerate(TARGETS)]
SOURCE = TOKENS - 3  # of each batch


def fit(limit: MaxTokens, *others: Any, **settings: Any) -> Any:
    return run_fit([ExactTokenMean(), *others, limit], settings.pop("module", None), BATCHES, **settings)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"target": 1}, 1),
        ({"target": 12}, 2),
        ({"target": 13}, 4),
        ({"source": SOURCE}, 1),
        ({"source": SOURCE + 1}, 2),
        ({"source": 6 * SOURCE}, 6),
        ({"source": 3 * SOURCE, "target": 12}, 2),
        ({"source": SOURCE, "target": 37}, 1),
        ({"target": 10_000}, 8),
    ],
    ids=str,
)
def test_the_step_that_reaches_a_limit_is_the_last(limits: dict[str, int], steps: int) -> None:
    limit = MaxTokens(**limits)
    trainer = fit(limit)
    assert trainer.global_step == steps
    assert limit.seen == TokensSeen(steps * SOURCE, sum(TARGETS[:steps]))


def test_a_limit_counts_whole_steps() -> None:
    limit = MaxTokens(target=4)  # reached by the second of three micro-batches
    assert fit(limit, accumulate_grad_batches=3).global_step == 1
    assert limit.seen.target_tokens == 12


@pytest.mark.parametrize("order", [1, -1], ids=["metrics_first", "limit_first"])
def test_the_last_step_is_logged_in_any_order_of_callbacks(order: int) -> None:
    callbacks = [TrainingMetrics(), MaxTokens(target=17)][::order]
    trainer = run_fit([ExactTokenMean(), *callbacks], None, BATCHES, log_every_n_steps=100)
    assert trainer.logger.column("train/target_tokens") == [17]
    assert trainer.logger.column("train/source_tokens") == [4 * SOURCE]
    assert trainer.global_step == 4


class _Steps(ToyLM):
    def __init__(self) -> None:
        super().__init__()
        self.validated_at: list[int] = []

    def on_validation_start(self) -> None:
        self.validated_at.append(self.trainer.global_step)


def test_lightning_validates_before_the_stop() -> None:
    module = _Steps()
    fit(MaxTokens(target=12), module=module, validation=loader(BATCHES[:1]))
    assert module.validated_at == [2]


def test_min_steps_hold() -> None:
    limit = MaxTokens(target=3)
    assert fit(limit, min_epochs=0, min_steps=5).global_step == 5


def test_a_limit_at_the_end_of_an_epoch_stops_there() -> None:
    limit = MaxTokens(target=sum(TARGETS))
    trainer = fit(limit, max_epochs=5)
    assert (trainer.global_step, trainer.current_epoch) == (8, 1)


def test_a_limit_in_a_later_epoch() -> None:
    assert fit(MaxTokens(source=10 * SOURCE), max_epochs=5).global_step == 10


def test_a_resumed_run_goes_on_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    run_fit([ExactTokenMean(), MaxTokens(target=20)], None, BATCHES, max_steps=3).save_checkpoint(path)
    state = torch.load(path, weights_only=True)["callbacks"]["MaxTokens"]
    assert state == {"source_tokens": 3 * SOURCE, "target_tokens": 12}
    limit = MaxTokens(target=20)
    trainer = run_fit([ExactTokenMean(), limit], None, BATCHES[3:], ckpt_path=path, max_epochs=2, max_steps=-1)
    assert trainer.global_step == 5  # 12, then 5 and 8
    assert limit.seen == TokensSeen(5 * SOURCE, 25)


def test_a_run_that_has_its_tokens_does_no_step(tmp_path: Path) -> None:
    path = tmp_path / "done.ckpt"
    run_fit([ExactTokenMean(), MaxTokens(target=12)], None, BATCHES).save_checkpoint(path)
    limit = MaxTokens(target=12)
    trainer = run_fit([ExactTokenMean(), limit], None, BATCHES[2:], ckpt_path=path, max_epochs=3)
    assert trainer.global_step == 2
    assert limit.seen.target_tokens == 12
    more = MaxTokens(target=13)  # the new limit wins
    assert run_fit([ExactTokenMean(), more], None, BATCHES[2:], ckpt_path=path, max_epochs=3).global_step == 4


def test_a_limit_that_is_added_on_resume_knows_what_the_metrics_counted(tmp_path: Path) -> None:
    path = tmp_path / "before.ckpt"
    run_fit([ExactTokenMean(), TrainingMetrics()], None, BATCHES, max_steps=3).save_checkpoint(path)
    for order in (1, -1):
        callbacks = [TrainingMetrics(), MaxTokens(target=17)][::order]
        trainer = run_fit([ExactTokenMean(), *callbacks], None, BATCHES[3:], ckpt_path=path, max_epochs=2)
        assert trainer.global_step == 4


def test_a_second_fit_of_one_trainer_goes_on() -> None:
    limit, metrics = MaxTokens(target=10_000), TrainingMetrics()
    trainer = fit(limit, metrics, max_steps=2)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit_loop.max_epochs = 2
    trainer.fit(ToyLM(), loader(BATCHES[2:]), loader(BATCHES))
    assert limit.seen == metrics._tokens.seen == TokensSeen(4 * SOURCE, sum(TARGETS[:4]))


class _Recorded(ReadingSteps, MaxTokens):
    """Notes at which steps something was read from the device."""


def test_the_count_is_read_only_where_the_end_may_be_near() -> None:
    batches = with_host_keys(BATCHES) * 40
    limit = _Recorded(source=300 * SOURCE)
    trainer = run_fit([limit], ToyLM(), batches)
    assert trainer.global_step == 300
    assert len(limit.read_at) < 25
    assert limit.read_at[0] == 1
    assert limit.read_at[-1] == 300


def test_rows_that_grow_with_a_warm_up_do_not_pass_the_limit_unseen() -> None:
    # The budget tells what is to come while the first rows are small: one source token each.
    first = torch.full((1, TOKENS), -1).index_fill(1, torch.tensor([0]), 0)
    small = [{**make_batch(seed, 1), "source_ids": first} for seed in range(20)]
    limit = MaxTokens(source=20 + 3 * SOURCE)
    assert run_fit([limit], ToyLM(), [*small, *BATCHES]).global_step == 23


@pytest.mark.parametrize("value", ["512K", "1M", "2e10", 20_000, 1e6])
def test_limits_are_written_as_token_counts(value: Any) -> None:
    expected = {"512K": 2**19, "1M": 2**20, "2e10": 20_000_000_000, 20_000: 20_000, 1e6: 1_000_000}[value]
    assert MaxTokens(target=value).token_horizon == expected
    assert MaxTokens(source=value, target=2**50).token_horizon == expected


@pytest.mark.parametrize("limits", [{}, {"target": 0}, {"source": -5}, {"target": "many"}, {"target": 1.5}])
def test_what_is_no_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="MaxTokens"):
        MaxTokens(**limits)


class _Plain(ToyLM):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"]).square().mean()


@pytest.mark.parametrize(("limits", "key"), [({"target": 5}, "shift_labels"), ({"source": 5}, "input_ids")])
def test_batches_that_do_not_tell_are_refused(limits: dict[str, int], key: str) -> None:
    batch = {"input_ids": torch.tensor([[1, 2]])} if "target" in limits else {"x": torch.tensor([[1, 2]])}
    module = _Plain()
    module.training_step = lambda batch, batch_idx: module.model.head.weight.square().mean()  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=key):
        run_fit([MaxTokens(**limits)], module, [batch])


def test_limits_of_several_owners_join() -> None:
    assert TokensSeen(0, 7).nearest(TokensSeen(3, 9)) == TokensSeen(3, 7)
    assert TokensSeen(4, 0).largest(TokensSeen(3, 9)) == TokensSeen(4, 9)
    assert not TokensSeen(5, 5).reaches(TokensSeen())
    assert StepTally().seen == TokensSeen()
