"""What a Python block of the documentation stands in, where it is not a whole program.

A block runs as it is shown, between the lines before and after that are given here; one that is not listed runs alone.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tests.contracts.pages import Block


@dataclass(frozen=True)
class Around:
    """Lines before and after a block; with ``indent`` the block is the body of what stands before it."""

    before: str = ""
    after: str = ""
    indent: bool = False


_ROW = """
import torch
from lightning_longctx.datamodules import Document, pack_documents
ids = torch.arange(24) % 16
batch = pack_documents([Document(0, 0, 0, ids[:10]), Document(0, 1, 0, ids[10:])], max_tokens_per_batch=24)
"""

AROUND = {
    "CONTRIBUTING.md: from tests.helpers.pool import run_ranks": Around(
        "import pytest", "assert callable(test_ranks_agree)"
    ),
    "docs/activation_offload.md: from lightning_longctx import offload_activations": Around(
        """
import torch
batch = torch.randn(512, 1024)
layers = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8))
model = type("Model", (torch.nn.Module,), {"forward": lambda self, batch: layers(batch).sum()})()
""",
        "assert all(parameter.grad is not None for parameter in layers.parameters())",
    ),
    "docs/activation_offload.md: contexts = offload.checkpoint_contexts(policy)": Around(
        """
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from lightning_longctx import offload_activations
block, x = torch.nn.Linear(1024, 1024), torch.randn(512, 1024, requires_grad=True)
policy = lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE
with offload_activations("async", block) as offload:
""",
        "assert offload is not None",
        indent=True,
    ),
    "docs/callbacks.md: trainer = Trainer(": Around(
        "from lightning.pytorch import Trainer\nfrom lightning_longctx import ExactTokenMean, TrainingMetrics",
        "assert any(isinstance(callback, ExactTokenMean) for callback in trainer.callbacks)",
    ),
    "docs/causal_lm_module.md: import lightning_longctx.integrations.transformers": Around(
        _ROW
        + """
from transformers import AutoConfig, AutoModelForCausalLM
from lightning_longctx import model_inputs
config = AutoConfig.for_model("llama", vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2)
""",
        "assert hidden.shape == (1, 24, 16)",
    ),
    "docs/command_line.md: from lightning_longctx.cli import": Around(
        """
from pathlib import Path
Path("run.yaml").write_text(
    "{trainer: {accelerator: cpu, devices: 1}, model: {config: tiny-llama}, data: {sources: {code: python-stdlib}}}")
""",
        "assert data.max_seq_len == 8192 and cli.model is not None and cli.trainer is not None",
    ),
    "docs/loss.md: from lightning_longctx import causal_lm_loss": Around(
        _ROW
        + """
from types import SimpleNamespace
class Backbone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lm_head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
    def forward(self, input_ids, **facts):
        assert "shift_labels" not in facts
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))
""",
        "step = training_step(SimpleNamespace(model=Backbone()), batch, 0)\nstep['loss'].backward()\n"
        "assert step['per_token_loss'].shape == batch['input_ids'].shape",
    ),
    "docs/loss.md: router = weighted_term(": Around(
        _ROW
        + """
from types import SimpleNamespace
from lightning_longctx import weighted_term
router_loss = torch.ones((), requires_grad=True)
out = SimpleNamespace(loss=torch.zeros(()), per_token_loss=torch.zeros(1, 24))
def step():
""",
        "assert set(step()['extra_terms']) == {'router'}",
        indent=True,
    ),
    "docs/moe_router_heatmap.md: from lightning_longctx import record_router_indices": Around(
        "import torch\nfrom torch import nn",
        "layer = MyMoE()\nlayer.gate = nn.Linear(4, 8)\nlayer(torch.randn(2, 4))",
    ),
    "docs/strategy.md: def configure_model(self):": Around(
        "import torch\nMyModel = lambda: torch.nn.Linear(2, 2)\nclass Module: ...",
        "module = Module()\nconfigure_model(module)\nassert module.model.weight.is_meta",
    ),
    "docs/strategy.md: def predict_step(self, batch, batch_idx):": Around(
        """
import torch
from types import SimpleNamespace
from lightning.pytorch import Trainer
from lightning_longctx import gather_row, topology_of
trainer = Trainer(accelerator="cpu", devices=1, logger=False)
losses = SimpleNamespace(per_token_loss=torch.ones(1, 4))
""",
        "module = SimpleNamespace(trainer=trainer, loss_of=lambda batch: losses)\n"
        "assert predict_step(module, {}, 0).shape == (1, 4)",
    ),
}


def whole(block: Block) -> str:
    """The program that a block is part of."""
    found = [around for name, around in AROUND.items() if block.name.startswith(name)]
    around = found[0] if found else Around()
    body = textwrap.indent(block.text, "    ") if around.indent else block.text
    return f"{around.before}\n{body}\n{around.after}\n"
