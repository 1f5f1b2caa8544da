"""ChannelLoss in somebody's own project: padded batches, labels that are not shifted, metadata beside the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_longctx.batch import IGNORE_INDEX
from lightning_longctx.callbacks import ChannelLoss, ChannelOptions
from lightning_longctx.errors import BatchContractError
from tests.callbacks.channels import channel_rows, fit, loader
from tests.callbacks.toy import ToyLM, ToyModel


class _Foreign(ToyLM):
    """Somebody's module: padded [B, S] batches with labels that are not shifted."""

    def __init__(self, width: int = 0) -> None:
        super().__init__(lr=0.0)
        self.width, self.seen_keys = width, []

    def _step(self, batch: Any) -> Any:
        self.seen_keys.append(sorted(batch))
        logits = self.model.head(self.model(batch["input_ids"]))[:, :-1]
        labels = batch["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        mean = losses.sum() / (labels != IGNORE_INDEX).sum()
        return {"loss": mean, "per_token_loss": torch.nn.functional.pad(losses, (0, self.width))}


def padded(ids: Any, **extra: Any) -> dict[str, Any]:
    tokens = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[1, 3:] = IGNORE_INDEX
    labels[2, :2] = IGNORE_INDEX
    return {"input_ids": tokens, "labels": labels, "dataset_id": ids, **extra}


@pytest.mark.parametrize("width", [0, 1], ids=["S-1 losses", "S losses"])
@pytest.mark.parametrize(
    "ids",
    [torch.tensor([1, 0, 1]), torch.tensor([[1], [0], [1]]), [1, 0, 1], ["web", "code", "web"]],
    ids=["tensor", "column", "list", "names"],
)
def test_padded_batches_with_one_id_per_row(ids: Any, width: int) -> None:
    callback = ChannelLoss(source_key="dataset_id", source_names=["code", "web"])
    module = _Foreign(width)
    ((_, found),) = channel_rows(fit(callback, module, [padded(ids)], callbacks=[callback]))
    assert (found["channel_tokens/code"], found["channel_tokens/web"]) == (2, 5 + 4)
    assert found["channel_loss/coverage"] == 1
    assert module.seen_keys == [["input_ids", "labels"]]  # the id never reached the step
    batch = padded(ids)
    model = ToyModel()
    losses = torch.nn.functional.cross_entropy(
        model.head(model(batch["input_ids"]))[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    )
    assert found["channel_loss/code"] == pytest.approx(losses[1].sum().item() / 2, rel=1e-6)
    assert found["channel_loss/web"] == pytest.approx(losses[[0, 2]].sum().item() / 9, rel=1e-6)


def test_metadata_is_hidden_on_unsampled_steps_too_and_callbacks_see_it() -> None:
    seen: list[list[str]] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
            seen.append(sorted(batch))

    batch = padded([1, 0, 1], url=["a", "b", "c"], name=["x", "y", "x"])
    options = ChannelOptions(extra_strip_keys=["url"])
    callback = ChannelLoss(source_name_key="name", every_n_steps=2, options=options)
    module = _Foreign()
    validation = loader([batch])
    fit(callback, module, [batch] * 3, callbacks=[callback, Look()], validation=validation, num_sanity_val_steps=1)
    assert module.seen_keys == [["input_ids", "labels"]] * 5
    assert seen == [["dataset_id", "input_ids", "labels", "name", "url"]] * 3
    assert callback.latest.keys() == {"x", "y"}


def test_ids_may_be_sparse() -> None:
    batch = padded(torch.tensor([90210, 7, 90210]))
    callback = ChannelLoss(source_key="dataset_id", source_names={90210: "web", 7: "code"})
    fit(callback, _Foreign(), [batch], callbacks=[callback])
    assert {name: value.targets for name, value in callback.latest.items()} == {"code": 2, "web": 9}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_id": None}, "must hold source ids"),
        ({"dataset_id": torch.tensor([1, 2])}, "must have one id per row"),
        ({"dataset_id": torch.tensor([0.5, 1.0, 2.0])}, "integer source ids"),
        ({"dataset_id": torch.tensor([1, 5, 0])}, "must give each target a known source"),
    ],
    ids=["none", "shape", "floats", "unknown"],
)
def test_strict_refuses_what_cannot_be_told(change: Any, words: str) -> None:
    callback = ChannelLoss(source_key="dataset_id", source_names=["code", "web"], strict=True)
    with pytest.raises(BatchContractError, match=words):
        fit(callback, _Foreign(), [padded([0, 1, 0]) | change], callbacks=[callback])
    loose = ChannelLoss(source_key="dataset_id", source_names=["code", "web"])
    with pytest.warns(UserWarning, match=words):
        rows = channel_rows(fit(loose, _Foreign(), [padded([0, 1, 0]) | change], callbacks=[loose]))
    assert rows[0][1]["channel_loss/coverage"] < 1
    assert bool(loose.closing_lines()) == bool(loose.latest), "no table without a line"
