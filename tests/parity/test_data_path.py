"""From documents to weights: the data module, the strategy and the model together equal one plain process.

One step over all documents: whatever rows the policy makes of them, and however these are dealt, padded and sliced, the
exact token mean is the mean over all targets. Lengths of 7, 8, 9 and 1 tokens need padding at sp 2 and 4; ranks run out
of rows at different times.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from lightning_longctx import CausalLMModule, DynamicBatchingDataModule, LongContextFSDPStrategy, TrainingMetrics
from lightning_longctx.datamodules import LoadingSettings
from tests.helpers.pool import run_ranks
from tests.helpers.trainers import quiet_trainer
from tests.parity.layouts import whole
from tests.parity.models import CONFIGS
from tests.parity.reference import plain_model, relative_error
from tests.parity.rows import VOCABULARY

pytestmark = pytest.mark.distributed

LENGTHS = [7, 8, 9, 1, 15, 3, 16, 2, 11, 30, 5, 6, 13]
WINDOW = 32


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def no_text(text: str) -> list[int]:
    raise AssertionError(text)  # the documents are tokenized already


class OneStep(CausalLMModule):
    """Starts from given weights and makes one step of SGD."""

    def __init__(self, start: dict[str, torch.Tensor]) -> None:
        super().__init__(config=CONFIGS["qwen3"])
        self.start = start

    def configure_model(self) -> None:
        fresh = self.model is None
        super().configure_model()
        if fresh:
            self.model.load_state_dict(self.start)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(start: dict[str, torch.Tensor], world: int, sp: int, policy: str, workers: int) -> dict[str, torch.Tensor]:
    warnings.simplefilter("ignore")
    module = OneStep(start)
    data = DynamicBatchingDataModule(
        {"docs": [{"input_ids": document.tolist()} for document in documents()]},
        tokenizer=no_text,
        max_seq_len=WINDOW,
        buffer_policy=policy,
        loading=LoadingSettings(on_uneven_end="pad", num_workers=workers),
    )
    trainer = quiet_trainer(
        devices=world,
        strategy=LongContextFSDPStrategy(sequence_parallel_size=sp),
        max_epochs=1,
        accumulate_grad_batches=100,  # more than there are rows: the epoch ends in one step
        callbacks=[TrainingMetrics()],
        log_every_n_steps=1,
    )
    trainer.fit(module, data)
    assert trainer.global_step == 1
    weights = {name: whole(parameter) for name, parameter in module.model.named_parameters()}
    return {**weights, "loss": trainer.callback_metrics["train/loss"]}


@pytest.mark.parametrize(
    ("world", "sp", "policy", "workers"),
    [(1, 1, "adaptive", 0), (2, 2, "adaptive", 0), (2, 1, "fixed", 0), (4, 2, "adaptive", 1), (4, 4, "fixed", 0)],
)
def test_a_step_over_all_documents_equals_a_plain_process(world: int, sp: int, policy: str, workers: int) -> None:
    model = plain_model("qwen3", seed=0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total, targets = torch.zeros(()), 0
    for document in documents():
        if len(document) > 1:
            logits = model(input_ids=document[None], use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits, document[1:], reduction="sum")
            targets += len(document) - 1
    assert targets == sum(LENGTHS) - len(LENGTHS)
    (total / targets).backward()
    expected = {name: (p - p.grad).detach() for name, p in model.named_parameters()}
    for rank in run_ranks(train, world, start, world, sp, policy, workers):
        assert float(rank.pop("loss")) == pytest.approx(float(total.detach()) / targets, rel=1e-5)
        assert relative_error(rank, expected) <= 1e-5
