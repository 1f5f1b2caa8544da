"""A model directory with a chat template trains on conversations: only what the assistant writes has a loss."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_longctx import CausalLMModule, DynamicBatchingDataModule
from lightning_longctx.batch import IGNORE_INDEX
from tests.callbacks.toy import make_trainer
from tests.datamodules import chat_templates as templates

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, and you?"}]
MORE = [*TURNS, {"role": "user", "content": "fine"}, {"role": "assistant", "content": "good"}]


class Recording(CausalLMModule):
    """Keeps what it was trained on."""

    seen: list[tuple[Tensor, Tensor]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch["input_ids"], batch["shift_labels"]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_the_targets_of_a_run_are_what_the_assistant_writes(tmp_path: Path, train_on: str) -> None:
    tokenizer = templates.tokenizer(templates.PLAIN_CHATML)
    tokenizer.save_pretrained(tmp_path)
    CausalLMModule(config="tiny-llama").config.save_pretrained(tmp_path)
    with gzip.open("talk.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"messages": messages}) + "\n" for messages in (TURNS, MORE))
    module = Recording(config=str(tmp_path))
    module.seen = []
    sources = {"talk": {"path": "talk.jsonl.gz", "format": "chat", "train_on": train_on}}
    data = DynamicBatchingDataModule(sources, tokenizer="from_model", max_seq_len=512)
    make_trainer([], max_epochs=1, max_steps=-1).fit(module, datamodule=data)
    ((ids, labels),) = module.seen
    expected_ids, expected_labels = [], []
    for messages in (TURNS, MORE):
        own_ids, own_labels = templates.expected(templates.chatml(messages, None), tokenizer)
        expected_ids += own_ids
        # Shifted inside the document: each token's label is the next token.
        expected_labels += [*(own_ids if train_on == "all" else own_labels)[1:], IGNORE_INDEX]
    assert ids[0].tolist() == expected_ids
    assert labels[0].tolist() == expected_labels
