"""How many lines of somebody's own project change to take a part of the suite, counted and run.

The project is a module, a data module and a YAML under Lightning's own command line. Each change is applied to its
text; the number of changed lines is that of a line diff, and both versions train two steps.
"""

from __future__ import annotations

import csv
import difflib
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

SCRIPT = """\
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)

    def forward(self, x, chosen, shares):
        return sum(shares[:, i, None] * torch.einsum("tw,twv->tv", x, self.weight[chosen[:, i]]) for i in range(2))


class Router(nn.Linear):
    def forward(self, x):
        shares, chosen = super().forward(x).softmax(-1).topk(2)
        return shares, chosen


class MixtureOfExperts(nn.Module):
    def __init__(self, width, count=4):
        super().__init__()
        self.router = Router(width, count)
        self.experts = Experts(width, count)

    def forward(self, x):
        shares, chosen = self.router(x.flatten(0, 1))
        return self.experts(x.flatten(0, 1), chosen, shares).view_as(x)


class Model(LightningModule):
    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(264, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = MixtureOfExperts(width)
        self.head = nn.Linear(width, 264)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.mlp(x))

    def training_step(self, batch, batch_idx):
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        ids = torch.arange(number, number + 12) % 264
        labels = torch.where(torch.arange(12) < 12 - number, ids, -100)  # the end of each row is padding
        return {"input_ids": ids, "labels": labels, "dataset_id": number % 2}


class Data(LightningDataModule):
    def __init__(self, path: str, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(Rows(), batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(Model, Data, seed_everything_default=1)
"""

CONFIG = """\
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: CSVLogger, init_args: {save_dir: logs, name: "", version: 0}}
  strategy: auto
  callbacks:
  - {class_path: LearningRateMonitor}
data: {path: texts/*.txt, batch_size: 2}
"""

#: What is replaced by what, in the script or in the configuration: whole lines.
Change = tuple[str, str]

_LAST = "  - {class_path: LearningRateMonitor}\n"
CHECKPOINT: list[Change] = [(_LAST, f"{_LAST}  - {{class_path: lightning_longctx.AsyncDCPCheckpoint}}\n")]
ROUTER: list[Change] = [(_LAST, f"{_LAST}  - {{class_path: lightning_longctx.MoERouterHeatmap}}\n")]
_CHANNEL = "{class_path: lightning_longctx.ChannelLoss, init_args: {source_key: dataset_id, source_names: [web, code]}}"
CHANNEL: list[Change] = [
    (_LAST, f"{_LAST}  - {_CHANNEL}\n"),
    (
        '        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])\n',
        '        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")\n'
        '        return {"loss": losses.sum() / (batch["labels"][:, 1:] != -100).sum(), "per_token_loss": losses}\n',
    ),
]
_STRATEGY = "{class_path: lightning_longctx.LongContextFSDPStrategy, init_args: {sequence_parallel_size: 1}}"
LONG_ROWS: list[Change] = [
    (
        "from torch.nn import functional as F\n",
        "from lightning_longctx import DynamicBatchingDataModule, causal_lm_loss, ulysses_attention\n",
    ),
    ("    def forward(self, ids):\n", "    def forward(self, ids, batch):\n"),
    (
        "        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)\n",
        "        x = x + ulysses_attention(q, k, v, batch).transpose(1, 2).flatten(2)\n",
    ),
    (
        '        logits = self(batch["input_ids"])\n'
        '        return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:])\n',
        '        out = causal_lm_loss(None, None, batch, logits=self(batch["input_ids"], batch))\n'
        '        return {"loss": out.loss, "per_token_loss": out.per_token_loss}\n',
    ),
    ("    LightningCLI(Model, Data,", "    LightningCLI(Model, DynamicBatchingDataModule,"),
    ("  strategy: auto\n", f"  strategy: {_STRATEGY}\n"),
    ("data: {path: texts/*.txt, batch_size: 2}\n", "data: {sources: {a: texts/*.txt}, max_seq_len: 1K}\n"),
]


def changed(changes: list[Change]) -> tuple[str, str]:
    """The project with changes, each of which must fit exactly one place."""
    both = {"script": SCRIPT, "config": CONFIG}
    for old, new in changes:
        assert SCRIPT.count(old) + CONFIG.count(old) == 1, old
        both = {name: text.replace(old, new) for name, text in both.items()}
    return both["script"], both["config"]


def changed_lines(before: str, after: str) -> int:
    """Lines that a person edits, adds or deletes: in each place the more of what went and what came."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


@pytest.mark.parametrize(
    ("changes", "most"),
    [(CHECKPOINT, 1), (ROUTER, 1), (CHANNEL, 3), (LONG_ROWS, 8)],
    ids=["AsyncDCPCheckpoint", "MoERouterHeatmap", "ChannelLoss", "strategy and data module"],
)
def test_lines_to_change(changes: list[Change], most: int) -> None:
    script, config = changed(changes)
    assert changed_lines(SCRIPT, script) + changed_lines(CONFIG, config) <= most


def test_lines_are_counted() -> None:
    assert changed_lines("a\nb\nc", "a\nB\nc\nd") == 2
    assert changed_lines("a\nb\nc", "a\nc") == 1
    assert changed_lines("a\nb", "a\nx\ny") == 2


def run(script: str, config: str, folder: Path) -> list[dict[str, str]]:
    """Train; return the rows of metrics that have something in them."""
    folder.mkdir()
    (folder / "main.py").write_text(script)
    (folder / "config.yaml").write_text(config)
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / f"texts/{number}.txt").write_text(f"document {number} " * 60)
    code, _, err = run_python(["main.py", "fit", "--config", "config.yaml"], folder, limit=170)
    assert code == 0, err[-3000:]
    assert "`max_steps=2` reached" in err
    with (folder / "logs/version_0/metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_project_runs_as_it_is_and_with_all_three_callbacks(tmp_path: Path) -> None:
    """Together, which the numbers of lines allow: they are in different places or one below the other."""
    run(SCRIPT, CONFIG, tmp_path / "stock")
    script, config = changed(CHANNEL)
    for _, line in CHECKPOINT + ROUTER:
        config = config.replace(_LAST, line)
    rows = run(script, config, tmp_path / "changed")
    sources = [row["channel_loss/web"] for row in rows if row.get("channel_loss/web")]
    assert len(sources) == 2
    assert [row["channel_loss/coverage"] for row in rows if row.get("channel_loss/coverage")] == ["1.0", "1.0"]
    assert any(row.get("moe/max_vio") for row in rows)
    assert len(list((tmp_path / "changed/checkpoints").glob("step-00000002-*"))) == 1


@pytest.mark.slow
def test_the_project_runs_on_packed_rows(tmp_path: Path) -> None:
    script, config = changed([*LONG_ROWS, (_LAST, "  - {class_path: lightning_longctx.TrainingMetrics}\n")])
    losses = [float(row["train/loss"]) for row in run(script, config, tmp_path / "changed") if row.get("train/loss")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
