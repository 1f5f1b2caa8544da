"""5 + 5 steps are 10 unbroken ones, bit for bit: weights, optimizer, learning rate, loss, documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx import AsyncDCPCheckpoint, TrainingMetrics
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.errors import CheckpointError
from tests.callbacks.checkpoint_toy import Recorder, assert_same, fit


def _in_two(first: int = 5, second: int = 10, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An unbroken run, and one in two parts with the notes of both."""
    whole = fit("whole", second, **settings)
    before = fit("parts", first, **settings)
    after = fit("parts", second, ckpt_path="last", **settings)
    return whole, {**after, "notes": before["notes"] + after["notes"]}


@pytest.mark.parametrize("sp", [None, 1], ids=["one device", "FSDP2"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_five_and_five_are_ten(accumulate: int, sp: int | None) -> None:
    """pytorch#126881: state that an optimizer makes at its first step was not loaded, in silence."""
    whole, parts = _in_two(accumulate=accumulate, sp=sp)
    assert parts["notes"] == whole["notes"]
    assert_same(parts, whole)
    assert len(whole["notes"]) == 10 * accumulate


def test_inside_of_an_accumulation_interval_nothing_is_saved() -> None:
    """Lightning: saved by hand at micro-batch 5 of 4 and 4, the resumed step used 2 of 4 micro-batches."""
    fit("folder", 3, accumulate=4, checkpoint={"every_n_train_steps": 1, "keep_last": 9})
    assert [found.commit.step for found in scan("folder") if found.commit] == [3, 2, 1]


def test_over_epochs_with_a_second_resume() -> None:
    """Lightning#19764, #11029: a resume in the middle of an epoch repeated data."""
    settings: dict[str, Any] = {"data": {"sources": {"a": [{"text": "words " * 9}] * 12}}, "max_epochs": -1}
    whole = fit("whole", 30, **settings)
    notes: list[Any] = []
    for steps in (7, 16, 30):
        part = fit("parts", steps, ckpt_path="last", **settings)
        notes += part["notes"]
    assert whole["epoch"] > 1
    assert notes == whole["notes"]
    assert_same(part, whole)


def test_at_the_end_of_an_epoch() -> None:
    settings: dict[str, Any] = {"data": {"sources": {"a": [{"text": "words " * 9}] * 12}}}
    checkpoint = {"every_n_train_steps": None, "every_n_epochs": 1}
    whole = fit("whole", -1, max_epochs=3, checkpoint=checkpoint, **settings)
    before = fit("parts", -1, max_epochs=1, checkpoint=checkpoint, **settings)
    after = fit("parts", -1, "last", max_epochs=3, checkpoint=checkpoint, **settings)
    assert before["notes"] + after["notes"] == whole["notes"]
    assert_same(after, whole)


@pytest.mark.parametrize("sp", [None, 1], ids=["one device", "FSDP2"])
def test_after_a_validation_at_the_same_step(sp: int | None) -> None:
    settings: dict[str, Any] = {
        "sp": sp,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "data": {"validation_sources": {"v": [{"text": "held out"}] * 3}},
    }
    whole, parts = _in_two(**settings)
    assert parts["notes"] == whole["notes"]
    assert_same(parts, whole)


@pytest.mark.parametrize("sp", [None, 1], ids=["one device", "FSDP2"])
@pytest.mark.parametrize("parts", [{"unused": True}, {"tied": True}, {"frozen": True}, {"stepping": True}], ids=str)
def test_unused_tied_frozen_and_estimated(parts: dict[str, Any], sp: int | None) -> None:
    """NeMo AutoModel#2071, verl#7283: no state for parameters without gradients; Lightning#20550: stepping batches."""
    whole, broken = _in_two(parts=parts, sp=sp)
    assert broken["notes"] == whole["notes"]
    assert_same(broken, whole)


def test_with_other_optimizers() -> None:
    def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    def amsgrad(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, amsgrad=True)

    for make in (momentum, amsgrad, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Rprop):
        settings = {"parts": {"optimizer": make}}
        name = getattr(make, "__name__", "")
        whole = fit(f"whole-{name}", 4, **settings)
        fit(f"parts-{name}", 2, checkpoint={"every_n_train_steps": 2}, **settings)
        assert_same(fit(f"parts-{name}", 4, ckpt_path="last", **settings), whole)


def test_bfloat16_weights_with_float32_moments() -> None:
    class Mixed(torch.optim.Optimizer):
        """Keeps its moment in float32, as optimizers for bfloat16 weights do."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        def step(self, closure: Any = None) -> Any:
            loss = closure() if closure is not None else None
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float32))
                state["count"] = state.get("count", 0) + 1
                state["moment"].mul_(0.9).add_(parameter.grad.float(), alpha=0.123)
                with torch.no_grad():
                    parameter.sub_((state["moment"] * self.param_groups[0]["lr"]).to(parameter.dtype))
            return loss

    settings: dict[str, Any] = {"parts": {"optimizer": Mixed}}
    whole = fit("whole", 4, module=Recorder(optimizer=Mixed).bfloat16(), **settings)
    fit("parts", 2, module=Recorder(optimizer=Mixed).bfloat16(), checkpoint={"every_n_train_steps": 2}, **settings)
    after = fit("parts", 4, module=Recorder(optimizer=Mixed).bfloat16(), ckpt_path="last", **settings)
    assert after["optimizer"]["block.weight"]["moment"].dtype == torch.float32
    assert_same(after, whole)


def test_a_frozen_base_saves_what_is_trained_only() -> None:
    settings: dict[str, Any] = {"parts": {"frozen": True}, "options": {"trainable_only": True}}
    whole, parts = _in_two(**settings)
    assert_same(parts, whole)
    found = scan("parts")[0]
    assert found.commit is not None
    assert found.commit.trainable_only
    from lightning_longctx.checkpoint.restore import OpenCheckpoint

    assert sorted(OpenCheckpoint(found.path).weights()) == ["block.bias", "block.weight", "head.weight", "steps_seen"]
    module = Recorder(frozen=True)
    AsyncDCPCheckpoint.load_weights(found.path, module)
    assert torch.equal(module.head.weight, parts["weights"]["head.weight"])


def test_weights_alone_are_skipped_when_resuming() -> None:
    checkpoint = {"every_n_train_steps": 2, "optimizer_every_n_saves": 3, "keep_last": 9}
    fit("folder", 9, checkpoint=checkpoint)  # full at 2 and 8, weights at 4 and 6, the end at 9
    commits = {found.commit.step: found.commit.resumable for found in scan("folder") if found.commit}
    assert commits == {9: True, 8: True, 6: False, 4: False, 2: True}
    paths = {found.commit.step: found.path for found in scan("folder") if found.commit}
    with pytest.raises(CheckpointError, match="no state of the optimizer"):
        fit("folder", 10, ckpt_path=str(paths[6]))


def test_state_that_does_not_fit_is_named() -> None:
    fit("folder", 2)
    with pytest.raises(CheckpointError, match="optimizer_0 has no saved state for `unused.bias`"):
        fit("folder", 3, ckpt_path="last", module=_lenient())
    with pytest.raises(CheckpointError, match="no weights were saved for `unused.bias`"):
        fit("folder", 3, ckpt_path="last", parts={"unused": True})
    with pytest.warns(UserWarning, match="optimizer_0 has no saved state for `unused.bias`"):
        fit("folder", 3, ckpt_path="last", module=_lenient(), options={"on_missing": "warn"})


def _lenient() -> Recorder:
    module = Recorder(unused=True)
    module.strict_loading = False
    return module


def test_new_and_removed_callbacks() -> None:
    fit("folder", 2, callbacks=[TrainingMetrics()])
    with pytest.warns(UserWarning, match="TrainingMetrics"):
        fit("folder", 3, ckpt_path="last")
    fit("folder", 4, ckpt_path="last", callbacks=[TrainingMetrics()])
