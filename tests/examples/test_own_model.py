"""The example of an own model: the same losses on one process and on two that share each row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_longctx.batch import PackedSequence
from tests.contracts.source import ROOT
from tests.helpers.processes import run_python
from tests.helpers.scripts import load_script


def run_example(devices: int, folder: Path) -> float:
    words = [str(ROOT / "examples" / "own_model.py"), f"--devices={devices}", "--max-steps=3"]
    code, out, err = run_python(words, folder, limit=300)
    assert code == 0, out + err
    found = re.search(r"loss after 3 steps: ([\d.]+)", out)
    assert found, out
    return float(found.group(1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_own_model_trains_alike_on_one_and_two_processes(tmp_path: Path) -> None:
    alone, shared = run_example(1, tmp_path), run_example(2, tmp_path)
    assert alone < 5.6, "it learns: a uniform guess over 264 ids has 5.58"
    assert shared == pytest.approx(alone, rel=1e-5)


def test_the_own_model_equals_itself_with_the_attention_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one document the line that was replaced gives the same."""
    example = load_script("examples/own_model.py")
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
