"""What the strategy loads besides its own: stock Lightning's file and sharded directory, without running code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_longctx import CheckpointError, DynamicBatchingDataModule, LongContextFSDPStrategy, causal_lm_loss
from tests.callbacks.checkpoint_toy import DOCUMENTS, assert_same, full
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.distributed


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(257, 16), nn.Linear(16, 257, bias=False)

    def forward(self, batch: Any) -> Any:
        return causal_lm_loss(self.embedding(batch["input_ids"]), self.head.weight, batch)


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = _Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch)
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Stock(_Module):
    """Sharded in its own hook, as stock ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def _train(strategy: Any, module: pl.LightningModule, steps: int, path: str | None, callbacks: list[Any]) -> Any:
    pl.seed_everything(1, verbose=False)
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **settings,
    )
    data = DynamicBatchingDataModule(sources={"a": DOCUMENTS}, max_seq_len=64)
    trainer.fit(module, data, ckpt_path=path)
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = trainer.optimizers[0]
    return {
        "step": trainer.global_step,
        "rate": optimizer.param_groups[0]["lr"],
        "weights": {key: full(value) for key, value in module.state_dict().items()},
        "optimizer": {names[p]: {k: full(v) for k, v in entry.items()} for p, entry in optimizer.state.items()},
    }


def _from_stock(folder: str, sharded: bool) -> tuple[Any, Any]:
    keeper = ModelCheckpoint(folder, filename="stock", every_n_train_steps=3, save_top_k=1)
    strategy = ModelParallelStrategy(save_distributed_checkpoint=sharded, process_group_backend="gloo")
    saved = _train(strategy, _Stock(), 3, None, [keeper])
    loaded = _train(LongContextFSDPStrategy(), _Module(), 3, keeper.best_model_path, [_Same(folder)])
    return saved, loaded


class _Same(ModelCheckpoint):
    """Takes the state of the other one, so that Lightning does not warn of a missing callback."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, filename="stock", every_n_train_steps=3, save_top_k=1)

    @property
    def state_key(self) -> str:
        return super().state_key.replace("_Same", "ModelCheckpoint")


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded directory"])
def test_stock_checkpoints_are_loaded(tmp_path: Path, sharded: bool) -> None:
    for saved, loaded in run_ranks(_from_stock, 2, str(tmp_path / "stock"), sharded):
        assert_same(loaded, saved)


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


def _load_malicious(folder: str) -> str:
    try:
        _train(LongContextFSDPStrategy(), _Module(), 3, folder, [])
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_malicious_directory_runs_nothing_and_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Attack()))
    torch.save({}, tmp_path / "meta.pt")
    for message in run_ranks(_load_malicious, 2, str(tmp_path)):
        assert "asks for posix.system" in message
    assert not list(tmp_path.rglob("owned"))
