"""The hook on ``loss_function`` with real, tiny Hugging Face models, and with calls as fused kernels make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_longctx.callbacks import ChannelLoss, ChannelOptions
from lightning_longctx.callbacks.loss_hook import LossHook
from lightning_longctx.errors import BatchContractError, ConfigurationError
from tests.callbacks.channels import channel_rows, loader
from tests.callbacks.toy import run_fit

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


def model(kind: str = "LlamaForCausalLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    family = kind.partition("For")[0]
    return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**(SIZES | changes)))


def batch(seed: int = 0, ids: Any = (1, 0, 1)) -> dict[str, Any]:
    tokens = torch.randint(1, 32, (3, 7), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    labels[0, :3] = -100
    labels[2, 5:] = -100
    return {"input_ids": tokens, "labels": labels, "dataset_id": torch.tensor(ids)}


def by_row(network: Any, data: dict[str, Any]) -> tuple[list[float], list[int]]:
    """Sum of losses and number of targets of each row, by hand."""
    with torch.no_grad():
        logits = network(input_ids=data["input_ids"]).logits.double()
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), data["labels"][:, 1:], reduction="none")
    return losses.sum(1).tolist(), (data["labels"][:, 1:] != -100).sum(1).tolist()


class Bare(LightningModule):
    """What most people have: the model's own loss and nothing else."""

    def __init__(self, network: Any, **extra: Any) -> None:
        super().__init__()
        self.network, self.extra, self.losses, self.gradients = network, extra, [], []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.network(**batch, **self.extra).loss
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(**batch).loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients += [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def hooked(**settings: Any) -> ChannelLoss:
    options = ChannelOptions(loss_function=True)
    return ChannelLoss(source_key="dataset_id", source_names=["code", "web"], options=options, **settings)


@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 40}], ids=str)
def test_padded_batches_of_a_module_that_returns_only_a_loss(extra: Any) -> None:
    module = Bare(model(), **extra)
    data = [batch(0), batch(1, (0, 0, 1))]
    trainer = run_fit([hooked()], module, data, loader(data))
    assert len(module.losses) == 2
    rows = zip(channel_rows(trainer.logger), data, [(1, 0, 1), (0, 0, 1)], module.losses, strict=True)
    for (_, found), one, ids, loss in rows:
        sums, counts = by_row(module.network, one)
        for source, name in enumerate(["code", "web"]):
            own = [row for row in range(3) if ids[row] == source]
            targets = sum(counts[row] for row in own)
            assert found[f"channel_tokens/{name}"] == targets
            assert found[f"channel_loss/{name}"] == pytest.approx(sum(sums[row] for row in own) / targets, rel=1e-5)
        assert found["channel_loss/coverage"] == 1.0
        if not extra:
            total = sum(value for key, value in found.items() if "_weighted/" in key)
            assert total == pytest.approx(loss.item(), rel=1e-6)
    ((_, validated),) = channel_rows(trainer.logger, "val_channel")
    assert validated["val_channel_tokens/code"] + validated["val_channel_tokens/web"] == 2 * 14
    assert "loss_function" not in vars(module.network)
    assert "_loss_function" not in vars(module.network)


def test_loss_gradients_and_random_numbers_are_bit_equal() -> None:
    results = []
    for callbacks in ([], [hooked(every_n_steps=2)]):
        module = Bare(model(attention_dropout=0.3))
        data = [
            {key: value for key, value in batch(seed).items() if callbacks or key != "dataset_id"} for seed in range(3)
        ]
        run_fit(callbacks, module, data)
        results.append((module.losses, module.gradients, [torch.get_rng_state()]))
    for off, on in zip(*results, strict=True):
        assert len(off) == len(on) > 0
        assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))


def test_unsampled_steps_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    record = LossHook._record
    monkeypatch.setattr(LossHook, "_record", lambda self, *args: (recorded.append(1), record(self, *args))[1])
    trainer = run_fit([hooked(every_n_steps=3)], Bare(model()), [batch(seed) for seed in range(7)])
    assert len(recorded) == 2
    assert [step for step, _ in channel_rows(trainer.logger)] == [2, 5]


class _Adapter(nn.Module):
    """Passes everything through to the model inside, as wrappers of PEFT do."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.base_model = network

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)


def whole_graph(network: Any) -> Any:
    """Compiled without any break."""
    return torch.compile(network, backend="eager", fullgraph=True)


@pytest.mark.parametrize("wrap", [_Adapter, whole_graph], ids=["adapter", "compiled"])
def test_wrapped_models_are_watched_too(wrap: Any) -> None:
    module, data = Bare(wrap(model())), [batch(0), batch(1)]
    trainer = run_fit([hooked()], module, data)
    for (_, found), one in zip(channel_rows(trainer.logger), data, strict=True):
        sums, counts = by_row(model(), one)
        assert found["channel_loss/code"] == pytest.approx(sums[1] / counts[1], rel=1e-5)
    assert not any("loss_function" in vars(part) for part in module.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_the_hook_is_gone_also_after_an_error(fails: bool) -> None:
    class Failing(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            assert "_loss_function" in vars(self.network)
            if fails:
                raise RuntimeError("a bug of the user")
            return loss

    module = Failing(model())
    own = module.network._loss_function = module.network.loss_function  # set by the user, as Liger does
    if fails:
        with pytest.raises(RuntimeError, match="bug of the user"):
            run_fit([hooked()], module, [batch()])
    else:
        run_fit([hooked()], module, [batch()])
    assert module.network.loss_function is own
    assert vars(module.network)["_loss_function"] is own


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaForTokenClassification"])
def test_other_losses_are_refused_by_name(kind: str) -> None:
    module = Bare(model(kind))
    with pytest.raises(ConfigurationError, match="next-token cross entropy.*Classification"):
        run_fit([hooked()], module, [batch()])
    assert "_loss_function" not in vars(module.network)


@pytest.mark.parametrize("name", ["dpo_loss", "OrpoLoss", "diffusion_loss", "PreferenceLoss", "ForMaskedLMLoss"])
def test_custom_losses_are_refused_by_name(name: str) -> None:
    network = model()
    loss = lambda *args, **kwargs: None  # noqa: E731
    loss.__name__ = name
    network.loss_function = loss
    with pytest.raises(ConfigurationError, match=name):
        LossHook(Bare(network))


def test_a_module_without_such_a_model_is_refused() -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.loss_function = nn.CrossEntropyLoss()  # the module's own, which nobody calls with labels by name
            self.layer = nn.Linear(2, 2)

    with pytest.raises(ConfigurationError, match="needs a model with a `loss_function`"):
        LossHook(Plain())


class _Own(nn.Module):
    """A model with a loss function of its own that notes what it was given, and returns something odd."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = ("loss", "logits")

    def loss_function(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer


def record(*args: Any, **kwargs: Any) -> LossHook:
    root = nn.Sequential(_Own())
    hook = LossHook(root)
    hook.start(active=True)
    assert root[0].loss_function(*args, **kwargs) is root[0].answer  # passed on untouched
    return hook


LOGITS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
LABELS = torch.tensor([[1, 2, 3, -100, 4], [5, -100, 6, 7, 0]])
SHIFTED = torch.cat([LABELS[:, 1:], torch.full((2, 1), -100)], 1)
HIDDEN = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(4))
WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(5), requires_grad=True)
PLAIN = {"vocab_size": 8, "num_items_in_batch": torch.tensor(6)}


@pytest.mark.parametrize(
    ("args", "kwargs", "logits"),
    [
        ((LOGITS, LABELS, 8), {}, LOGITS),
        ((), {"logits": LOGITS, "labels": LABELS, **PLAIN}, LOGITS),
        ((LOGITS, None, 8), {"shift_labels": SHIFTED}, LOGITS),
        ((LOGITS.view(-1, 8), LABELS, 8, 6, -100, SHIFTED), {}, LOGITS),
        ((HIDDEN, WEIGHT, LABELS, 4), {}, HIDDEN @ WEIGHT.t()),
        ((), {"logits": None, "labels": LABELS, "hidden_states": HIDDEN, "weights": WEIGHT}, HIDDEN @ WEIGHT.t()),
        ((), {"hidden_states": HIDDEN, "lm_head_weight": WEIGHT, "labels": LABELS}, HIDDEN @ WEIGHT.t()),
        (
            (HIDDEN,),
            {"lm_head_weight": WEIGHT, "labels": LABELS, "hidden_states": HIDDEN, "final_logit_softcapping": 2.0},
            2.0 * torch.tanh(HIDDEN @ WEIGHT.t() / 2.0),
        ),
    ],
    ids=["positional", "keyword", "shifted", "all positional", "fused", "fused weights", "fused keyword", "cap"],
)
def test_ways_of_calling(args: Any, kwargs: Any, logits: Tensor) -> None:
    hook = record(*args, **kwargs)
    assert hook.problem is None
    ((losses, is_target),) = hook.calls
    expected = F.cross_entropy(logits.detach().flatten(0, 1), SHIFTED.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(is_target, SHIFTED != -100)
    assert not losses.requires_grad


def test_another_ignored_label() -> None:
    labels = LABELS.masked_fill(LABELS == -100, 0)
    hook = record(LOGITS, labels, 8, ignore_index=0)
    assert torch.equal(hook.calls[0].is_target, SHIFTED.masked_fill(SHIFTED == 0, -100) != -100)


@pytest.mark.parametrize(
    "kwargs", [{"logits": LOGITS}, {"labels": LABELS}, {"logits": LOGITS[:, :3], "labels": LABELS}], ids=str
)
def test_calls_that_cannot_be_read_are_noted_and_not_raised(kwargs: Any) -> None:
    hook = record(**kwargs)
    assert hook.calls == []
    assert isinstance(hook.problem, BatchContractError)


def test_long_rows_go_through_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_longctx.callbacks.loss_hook._CHUNK_ELEMENTS", 8)
    logits = torch.randn(1, 700, 8)
    labels = torch.randint(0, 8, (1, 700))
    hook = record(logits, labels, 8)
    expected = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")
    torch.testing.assert_close(hook.calls[0].losses[0, :-1], expected)


class _TwoCalls(nn.Module):
    """Multi-token prediction: a second head for the token after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(self, labels: Tensor, **inputs: Any) -> Any:
        out = self.network(**inputs)
        loss = self.network.loss_function(out.logits, labels, 32)
        further = F.pad(labels[:, 2:], (0, 2), value=-100)
        return loss + self.network.loss_function(out.logits, None, 32, shift_labels=further)


def test_several_calls_in_one_forward_are_kept_apart() -> None:
    """Seen elsewhere: of two loss calls in one forward only the last one was recorded."""

    class Module(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.network(**batch)

    module, data = Module(_TwoCalls()), batch()
    trainer = run_fit([hooked()], module, [data])
    ((_, first),), ((_, second),) = channel_rows(trainer.logger), channel_rows(trainer.logger, "channel2")
    sums, counts = by_row(module.network.network, data)
    assert first["channel_loss/code"] == pytest.approx(sums[1] / counts[1], rel=1e-5)
    with torch.no_grad():
        logits = module.network.network(input_ids=data["input_ids"]).logits
    further = F.cross_entropy(logits[:, :-2].transpose(1, 2), data["labels"][:, 2:], reduction="none")
    assert second["channel2_loss/code"] == pytest.approx(further[1].mean().item(), rel=1e-5)
    assert second["channel2_tokens/web"] == (data["labels"][[0, 2], 2:] != -100).sum()


def test_a_loss_with_other_terms_is_told_once() -> None:
    network = model()
    plain = network.loss_function
    network.loss_function = lambda *args, **kwargs: plain(*args, **kwargs) * 1.5
    with pytest.warns(UserWarning, match="is not the mean cross entropy") as caught:
        run_fit([hooked()], Bare(network), [batch(0), batch(1)])
    assert len([item for item in caught if "cross entropy" in str(item.message)]) == 1


def test_per_token_losses_of_the_step_come_first() -> None:
    class Module(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "per_token_loss": torch.full((3, 7), 2.0)}

    trainer = run_fit([hooked()], Module(model()), [batch()])
    assert channel_rows(trainer.logger)[0][1]["channel_loss/code"] == 2.0
