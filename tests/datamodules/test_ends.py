"""Real fits on 2 and 4 processes: unequal ends in training and validation, and a run that changes its ranks."""

from __future__ import annotations

import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.datamodules.helpers import Recorder, Stream, data_module, records, trainer
from tests.helpers.pool import run_ranks

pytestmark = pytest.mark.distributed

Keys = list[list[tuple[int, int]]]


def _ranks() -> int:
    return int(os.environ["WORLD_SIZE"])


def _uneven(count: int, ranks: int) -> list[dict[str, Any]]:
    """The last rank gets documents of 30 tokens, one a row; the others 4 tokens, eight a row."""
    return [{"input_ids": [1] * (30 if i % ranks == ranks - 1 else 4)} for i in range(count)]


def _fit(mode: str, runtime: str, workers: int, accumulate: int) -> tuple[Keys, Keys, dict[str, int], int]:
    module, ranks = Recorder(), _ranks()
    data = data_module(
        sources={"a": _uneven(10 * ranks, ranks)},
        validation_sources={"v": _uneven(3 * ranks + 1, ranks)},
        size=1,
        shuffle=False,
        on_uneven_end=mode,
        runtime=runtime,
        num_workers=workers,
    )
    run = trainer(
        devices=ranks,
        strategy="ddp",
        max_epochs=2,
        check_val_every_n_epoch=None,
        val_check_interval=3,
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=1,
    )
    run.fit(module, data)
    return module.seen, module.evaluated, data.global_counters(), run.global_step


@pytest.mark.parametrize(
    ("world", "mode", "runtime", "workers", "accumulate"),
    [
        (2, "stop", "main", 0, 1),
        (2, "pad", "worker", 1, 4),
        (2, "stop", "worker", 0, 4),
        (4, "pad", "main", 0, 1),
        (4, "stop", "worker", 0, 1),
    ],
)
def test_unequal_ranks_end_together(world: int, mode: str, runtime: str, workers: int, accumulate: int) -> None:
    """axolotl#494, VeOmni#864, Lightning#18023, #20404, #6798, litdata#233: rank 0 has 2 rows where the last has 10.

    All ranks take equally many steps, validation reads each document equally often, and every document is packed or
    counted as left over. The limit of 60 s is that of the pool of processes.
    """
    results = run_ranks(_fit, world, mode, runtime, workers, accumulate)
    assert len({(len(seen), len(evaluated), step) for seen, evaluated, _, step in results}) == 1
    (seen, evaluated, counters, _), documents = results[0], 10 * world
    assert len(seen) == 2 * (10 if mode == "pad" else 2)
    for epoch in range(2):
        rows = [keys[epoch * len(seen) // 2 : (epoch + 1) * len(seen) // 2] for keys, *_ in results]
        trained = list(chain.from_iterable(chain(*part) for part in rows))
        assert len(trained) == len(set(trained))
        assert len(trained) == documents if mode == "pad" else len(trained) < documents
    lost = counters["documents_left_over"]
    assert counters["documents_read"] == counters["documents_packed"] + lost
    assert (lost == 0) == (mode == "pad")
    assert counters["tokens_read"] == counters["tokens_packed"] + counters["tokens_left_over"]
    validated = Counter(chain.from_iterable(chain(*keys[1:]) for _, keys, *_ in results))
    assert len(validated) == 3 * world + 1
    assert len(set(validated.values())) == 1
    assert len(evaluated) > 1


def _part(kind: Any, steps: int | None, start: str | None, runtime: str, folder: str) -> Keys:
    module, ranks = Recorder(), _ranks()
    data = data_module(
        sources={"a": kind(records(50)), "b": records(30, seed=1)},
        on_uneven_end="pad",
        runtime=runtime,
        num_workers=1 if ranks == 2 else 0,
    )
    save = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    settings: dict[str, Any] = {"strategy": "ddp"} if ranks > 1 else {}
    run = trainer(
        devices=ranks,
        enable_checkpointing=True,
        callbacks=[save],
        max_epochs=2,
        max_steps=-1 if steps is None else steps,
        **settings,
    )
    run.fit(module, data, ckpt_path=start)
    return module.seen


@pytest.mark.parametrize(("kind", "worlds"), [(list, (2, 4, 1)), (Stream, (4, 1, 2))])
@pytest.mark.parametrize("runtime", ["main", "worker"])
def test_a_run_that_changes_its_ranks_trains_each_document_once_a_pass(
    kind: Any, worlds: tuple[int, ...], runtime: str, tmp_path: Path
) -> None:
    """Stopped twice and resumed on another number of ranks; stock checkpoints hold the state of all of them."""
    seen: Keys = []
    start = None
    for world, steps in zip(worlds, (3, 6, None), strict=True):
        seen += chain(*run_ranks(_part, world, kind, steps, start, runtime, str(tmp_path)))
        start = str(tmp_path / f"step={steps}.ckpt")
    counts = Counter(chain(*seen))
    assert set(counts) == {(0, i) for i in range(50)} | {(1, i) for i in range(30)}
    assert set(counts.values()) == {2}
