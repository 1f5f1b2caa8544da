"""The example of an own model: the same losses on one process and on two that share each row."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_longctx.batch import PackedSequence
from tests.contracts.source import ROOT
from tests.examples.scripts import load_example


def run_example(devices: int, folder: Path) -> float:
    command = [sys.executable, str(ROOT / "examples" / "own_model.py"), f"--devices={devices}", "--max-steps=3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"loss after 3 steps: ([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found.group(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_own_model_trains_alike_on_one_and_two_processes(tmp_path: Path) -> None:
    alone, shared = run_example(1, tmp_path), run_example(2, tmp_path)
    assert alone < 5.6, "it learns: a uniform guess over 264 ids has 5.58"
    assert shared == pytest.approx(alone, rel=1e-5)


def test_the_own_model_equals_itself_with_the_attention_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one document the line that was replaced gives the same."""
    example = load_example("own_model")
    model, ids = example.OwnModel(), torch.arange(1, 12)[None]
    batch = {
        "input_ids": ids,
        "shift_labels": torch.cat([ids[:, 1:], torch.tensor([[-100]])], dim=1),
        "position_ids": torch.arange(11)[None],
        "cu_seqlens": torch.tensor([0, 11], dtype=torch.int32),
        "max_seqlen": 11,
        "loss_divisor": 11,
    }
    ours = model.step(batch)["per_token_loss"]

    def pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedSequence) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(example, "ulysses_attention", pytorch)
    torch.testing.assert_close(model.step(batch)["per_token_loss"], ours)
