"""The package is typed for those who use it: a strict check of a user's script against the installed package.

Types of an installed package count only if it has ``py.typed``. So the package is put into the site-packages of a small
environment, as the wheel does it, and mypy is asked about that environment and not about this checkout.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.contracts.source import PACKAGE, ROOT

# Each `type: ignore` is a mistake that must be found: under --strict one that is not needed is an error itself.
SCRIPT = '''
"""What a user writes."""

from typing import Any, assert_type

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_longctx import (
    AsyncDCPCheckpoint,
    CausalLMModule,
    ChannelLoss,
    DynamicBatchingDataModule,
    LongContextFSDPStrategy,
    MaxTokens,
    PackedBatch,
    causal_lm_loss,
    topology_of,
    ulysses_attention,
)
from lightning_longctx.datamodules import LoadingSettings, simulate_packing
from lightning_longctx.integrations import OptimizerSettings
from lightning_longctx.integrations import OptimizerSetings  # type: ignore[attr-defined]
from lightning_longctx.units import ONLY_IN_THE_COPY
from lightning_longctx import ChanelLoss  # type: ignore[attr-defined]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 32)
        self.head = nn.Linear(32, 257, bias=False)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        x: Tensor = self.embedding(batch["input_ids"])
        q = x.view(1, -1, 4, 8).transpose(1, 2)
        attended = assert_type(ulysses_attention(q, q, q, batch), Tensor)
        x = x + attended.transpose(1, 2).flatten(2)
        out = causal_lm_loss(x, self.head.weight, batch)
        rows: int = topology_of(self.trainer).dp_size
        assert rows
        return {"loss": out.loss, "per_token_loss": out.per_token_loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


data = DynamicBatchingDataModule(
    sources={"notes": [{"text": "words"}]}, max_seq_len="1K", loading=LoadingSettings(num_workers=2)
)
strategy = LongContextFSDPStrategy(sequence_parallel_size=2, activation_offload="async")
channel = ChannelLoss(every_n_steps=10)
trainer = Trainer(strategy=strategy, callbacks=[channel, MaxTokens(target="2e9"), AsyncDCPCheckpoint(keep_last=3)])
hugging_face = CausalLMModule(config="tiny-llama", optimizer=OptimizerSettings(lr=1e-3))
losses: dict[str, float] = {name: value.loss for name, value in channel.latest.items()}
fill: float = simulate_packing([3, 4, 5], policy="adaptive", max_tokens_per_batch=8, micro_batches=1).steady_fill
anything: Any = data.counters

copied: int = ONLY_IN_THE_COPY
LongContextFSDPStrategy(sequence_parallel_size="two")  # type: ignore[arg-type]
ChannelLoss(every_n_step=10)  # type: ignore[call-arg]
ulysses_attention(1, 2, 3, {})  # type: ignore[arg-type]
data.set_source_weights(["notes"])  # type: ignore[arg-type]
count: str = topology_of(trainer).world_size  # type: ignore[assignment]
'''


def _environment(folder: Path) -> Path:
    """An environment that sees what is installed here, and has a copy of the package; its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copytree(ROOT / PACKAGE, site / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    # Without `py.typed` in the copy another installation would be taken, or none: the script asks for this one.
    with (site / PACKAGE / "units.py").open("a") as file:
        file.write("\nONLY_IN_THE_COPY: int = 1\n")
    return site


def _strict(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    python = site.parents[2] / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "script.py"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=800)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_users_script_is_checked_against_our_types(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    site = _environment(tmp_path / "environment")
    done = _strict(tmp_path, site)
    assert done.returncode == 0, done.stdout + done.stderr
