"""``ExactTokenMean`` on one device: the gradients of a plain token mean, and what it refuses."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_longctx.callbacks import ExactTokenMean
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.loss import causal_lm_loss, weighted_term
from tests.callbacks.toy import ToyLM, ToyModel, make_batch, make_trainer, plain_loop, run_fit, token_mean

TARGETS = [3, 9, 0, 5, 8, 1, 7]
BATCHES = [make_batch(seed, targets) for seed, targets in enumerate(TARGETS)]


def windows(accumulate: int) -> list[list[Any]]:
    return [BATCHES[start : start + accumulate] for start in range(0, len(BATCHES), accumulate)]


def worst_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest max|g - ref| / max|ref| over the parameters."""
    pairs = zip(got, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def worst_of_steps(module: ToyLM, expected: list[list[Tensor]]) -> float:
    return max(worst_error(got, truth) for got, truth in zip(module.seen_gradients, expected, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2, 3, 7], ids=str)
def test_gradients_and_weights_equal_a_plain_loop(accumulate: int) -> None:
    """transformers#34191, torchtune#1875, mlx-lm#1544: a mean of means; Lightning#19987: the short last window."""
    module = ToyLM()
    run_fit([ExactTokenMean()], module, BATCHES, accumulate_grad_batches=accumulate)
    expected = plain_loop(windows(accumulate))
    assert worst_of_steps(module, expected["gradients"]) < 1e-6
    assert worst_error([p.detach() for p in module.model.parameters()], expected["weights"]) < 1e-6


def test_without_the_callback_the_gradients_are_others() -> None:
    module = ToyLM()
    run_fit([], module, BATCHES, accumulate_grad_batches=3)
    assert worst_error(module.seen_gradients[0], plain_loop(windows(3))["gradients"][0]) > 0.1


def test_clipping_sees_the_true_gradients() -> None:
    module = ToyLM()
    run_fit([ExactTokenMean()], module, BATCHES, accumulate_grad_batches=2, gradient_clip_val=0.3)
    expected = plain_loop(windows(2), clip=0.3)
    assert any(norm > 0.3 for norm in expected["norm"])
    assert worst_error([p.detach() for p in module.model.parameters()], expected["weights"]) < 1e-6


@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-6), ("bf16-mixed", 0.03)])
def test_other_precisions(precision: str, tolerance: float) -> None:
    module = ToyLM()
    run_fit([ExactTokenMean()], module, BATCHES, precision=precision, accumulate_grad_batches=2, max_steps=1)
    assert worst_of_steps(module, plain_loop(windows(2)[:1])["gradients"]) < tolerance


def test_float16_scaling() -> None:
    # 2^16 is the scale that a run begins with: gradients must be scaled before they are unscaled and clipped.
    module, scaler = ToyLM(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    run_fit([ExactTokenMean()], module, BATCHES, plugins=[plugin], accumulate_grad_batches=2, gradient_clip_val=0.3)
    expected = plain_loop(windows(2), clip=0.3)
    assert scaler.get_scale() == 2.0**16  # no step was skipped
    assert worst_error(module.seen_gradients[0], expected["gradients"][0]) < 5e-3
    assert worst_error([p.detach() for p in module.model.parameters()], expected["weights"]) < 5e-3


class _Extra(ToyLM):
    """With an extra term that differs between micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = causal_lm_loss(self.model(batch["input_ids"]), self.model.head.weight, batch)
        extra = weighted_term(self.extra(batch), batch)
        return {"loss": out.loss + extra, "per_token_loss": out.per_token_loss, "extra_terms": {"square": extra}}

    def extra(self, batch: Any) -> Tensor:
        return self.model(batch["input_ids"]).square().mean()


def test_extra_terms_are_weighted_by_targets() -> None:
    module, reference = _Extra(), _Extra()
    run_fit([ExactTokenMean()], module, BATCHES[:3], accumulate_grad_batches=3)
    expected = plain_loop([BATCHES[:3]])["gradients"][0]
    total = sum(TARGETS[:3])
    sum(reference.extra(batch) * count / total for batch, count in zip(BATCHES[:3], TARGETS, strict=False)).backward()
    expected[0] += reference.model.embedding.weight.grad
    assert worst_error(module.seen_gradients[0], expected) < 1e-6


class _Manual(ToyLM):
    def __init__(self, every: int = 1, closure: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every, self.closure = every, closure

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        output = self._step(batch)
        if self.closure:
            optimizer.zero_grad()
            optimizer.step(lambda: self.manual_backward(output["loss"]))
            return output
        self.manual_backward(output["loss"])
        if (batch_idx + 1) % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return output


@pytest.mark.parametrize(("every", "closure"), [(1, False), (2, False), (1, True)], ids=["plain", "every_2", "closure"])
def test_manual_optimization(every: int, closure: bool) -> None:
    module = _Manual(every, closure)
    run_fit([ExactTokenMean()], module, BATCHES[:6])
    expected = plain_loop([BATCHES[start : start + every] for start in range(0, 6, every)])
    assert worst_error([p.detach() for p in module.model.parameters()], expected["weights"]) < 1e-6


class _TwoSteps(_Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self._step(batch)
        self.manual_backward(output["loss"])
        for _ in range(2):
            self.optimizers().step()
        return output


def test_two_steps_in_one_training_step_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="once in each `training_step`"):
        run_fit([ExactTokenMean()], _TwoSteps(), BATCHES)


class _TwoOptimizers(_Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.model.parameters()]


def test_several_optimizers_are_refused_before_the_first_step() -> None:
    module = _TwoOptimizers()
    with pytest.raises(ConfigurationError, match="needs one optimizer, but got 2"):
        run_fit([ExactTokenMean()], module, BATCHES)
    assert module.seen_gradients == []


def test_a_step_without_token_losses_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="per_token_loss.*ExactTokenMean"):
        run_fit([ExactTokenMean()], ToyLM(per_token=False), BATCHES)


class _Mean(ToyLM):
    """The mistake of returning the readable mean."""

    def _step(self, batch: Any) -> dict[str, Tensor]:
        output = super()._step(batch)
        return output | {"loss": output["loss"] * batch["loss_divisor"] / (batch["shift_labels"] != -100).sum()}


def test_a_loss_that_is_already_a_mean_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"per_token_loss.sum\(\) / loss_divisor"):
        run_fit([ExactTokenMean()], _Mean(), BATCHES)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        pytest.param({"applies_token_mean": True}, "applies the exact token mean by itself.*Remove", id="ours"),
        pytest.param({"handles_gradient_accumulation": True}, "leaves gradient accumulation", id="deepspeed"),
    ],
)
def test_strategies_that_do_it_themselves_are_refused(attributes: dict[str, Any], message: str) -> None:
    strategy = types.SimpleNamespace(**{"handles_gradient_accumulation": False} | attributes)
    with pytest.raises(ConfigurationError, match=message):
        ExactTokenMean().setup(types.SimpleNamespace(strategy=strategy), ToyLM(), "fit")


def overridden(trainer: Any) -> set[str]:
    return {"training_step", "optimizer_step"} & vars(trainer.strategy).keys()


def test_the_strategy_gets_its_methods_back() -> None:
    trainer = run_fit([ExactTokenMean()], batches=BATCHES[:1])
    assert overridden(trainer) == set()


def test_the_strategy_gets_its_methods_back_after_an_error() -> None:
    class Fails(ToyLM):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(overridden(self.trainer))
            raise ArithmeticError

    seen: list[set[str]] = []
    callback, module = ExactTokenMean(), Fails()
    with pytest.raises(ArithmeticError):
        run_fit([callback], module, BATCHES)
    assert seen == [{"training_step", "optimizer_step"}]
    assert overridden(module.trainer) == set()


def test_an_earlier_wrapper_is_kept() -> None:
    trainer = make_trainer([])
    inner = trainer.strategy.training_step
    earlier = lambda *args: inner(*args)  # noqa: E731
    trainer.strategy.training_step = earlier
    callback = ExactTokenMean()
    callback.setup(trainer, ToyLM(), "fit")
    assert trainer.strategy.training_step is not earlier
    callback.teardown(trainer, ToyLM(), "fit")
    assert trainer.strategy.training_step is earlier


def test_validation_alone_is_not_touched() -> None:
    trainer = make_trainer([])
    ExactTokenMean().setup(trainer, ToyLM(), "validate")
    assert overridden(trainer) == set()


class _SkipRest(ToyLM):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_micro_batches_without_a_step_are_forgotten() -> None:
    module = _SkipRest()
    run_fit([ExactTokenMean()], module, BATCHES, accumulate_grad_batches=2, max_epochs=2)
    assert worst_of_steps(module, plain_loop([BATCHES[:2], BATCHES[:2]])["gradients"]) < 1e-6


class _LBFGS(ToyLM):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)


def test_closures_that_run_several_times() -> None:
    module, plain = _LBFGS(), ToyModel()
    run_fit([ExactTokenMean()], module, BATCHES[:2])
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=3)

    def closure_of(batch: Any) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            out = causal_lm_loss(plain(batch["input_ids"]), plain.head.weight, batch)
            loss = out.loss * batch["loss_divisor"] / (batch["shift_labels"] != -100).sum()
            loss.backward()
            return loss

        return closure

    for batch in BATCHES[:2]:
        optimizer.step(closure_of(batch))
    assert token_mean(BATCHES[:1], module.model) == pytest.approx(token_mean(BATCHES[:1], plain), rel=1e-4)
