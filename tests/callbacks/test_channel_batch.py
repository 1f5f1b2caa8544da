"""What is read from batches: targets, sources in every form, shards of a row, positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_longctx.batch import TOKEN_KEYS
from lightning_longctx.callbacks.channel_batch import POSITION_NAMES, BatchReader, losses_of_output
from lightning_longctx.callbacks.source_names import SourceTable
from lightning_longctx.errors import BatchContractError
from tests.callbacks.channels import Doc, row

TABLE = SourceTable(["a", "b", "c"])
LIKE = torch.zeros(2, 4)


def reader(**settings: Any) -> BatchReader:
    return BatchReader(TABLE, **settings)


def test_shifted_labels_are_taken_as_they_are() -> None:
    losses, is_target = losses_of_output(torch.ones(1, 4), {"shift_labels": torch.tensor([[5, -100, 0, 7]])})
    assert is_target.tolist() == [[True, False, True, True]]
    assert losses.shape == (1, 4)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3), (8,), (6,)], ids=str)
def test_labels_are_shifted(shape: Any) -> None:
    labels = torch.tensor([[1, 2, -100, 4], [-100, 2, 3, 4]])
    losses, is_target = losses_of_output(torch.ones(shape), {"labels": labels})
    expected = [[True, False, True], [True, True, True]]
    assert is_target[:, :3].tolist() == expected
    assert not is_target[:, 3:].any()
    assert losses.shape == is_target.shape


@pytest.mark.parametrize("batch", [{}, {"labels": torch.zeros(2, 5)}, {"shift_labels": torch.zeros(2, 4)}], ids=str)
def test_what_does_not_fit_is_refused(batch: Any) -> None:
    with pytest.raises(BatchContractError):
        losses_of_output(torch.ones(2, 3), batch)


def test_the_first_key_that_is_there_is_taken() -> None:
    assert reader().key_of({"ds_idx": 1, "source_ids": 2, "channel_id": None}) == "ds_idx"
    assert reader(source_key="mine").key_of({"ds_idx": 1, "mine": 2}) == "mine"
    with pytest.raises(BatchContractError, match="'mine'"):
        reader(source_key="mine").key_of({"ds_idx": 1})


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (1, [[1] * 4] * 2),
        ([0, 2], [[0] * 4, [2] * 4]),
        (torch.tensor([[0], [2]]), [[0] * 4, [2] * 4]),
        (torch.tensor([[0, 0, 1, 1], [2, 2, 2, 0]]), [[0, 1, 1, 1], [2, 2, 0, 0]]),
        (torch.tensor([[0, 0, 1, 1, 2], [2, 2, 2, 0, 1]]), [[0, 1, 1, 2], [2, 2, 0, 1]]),
        (["c", "a"], [[2] * 4, [0] * 4]),
    ],
    ids=["batch", "rows", "column", "tokens", "tokens and one more", "names"],
)
def test_forms_of_source_ids(ids: Any, expected: Any) -> None:
    assert reader().slots_of_targets({"source_id": ids}, LIKE).tolist() == expected


def test_one_id_for_each_document() -> None:
    batch = {"source_id": torch.tensor([2, 0, 1]), "cu_seqlens": torch.tensor([0, 3, 4, 6], dtype=torch.int32)}
    like = torch.zeros(1, 6)
    assert reader().slots_of_targets(batch, like).tolist() == [[2, 2, 0, 1, 1, 1]]
    assert reader().slots_of_tokens(batch, like).tolist() == [[2, 2, 2, 0, 1, 1]]


_WRONG_IDS = [
    torch.zeros(3),
    torch.tensor([1, 2, 3]),
    torch.zeros(2, 3).long(),
    True,
    [0, "a"],
    [0, None],
    [[0], [1, 2]],
    {},
    [],
]


@pytest.mark.parametrize("ids", [*_WRONG_IDS, object()], ids=lambda ids: str(ids)[:20])
def test_ids_that_fit_nothing_are_refused(ids: Any) -> None:
    with pytest.raises(BatchContractError):
        reader().slots_of_targets({"source_id": ids}, LIKE)


ROW = row(0, [Doc(0, 3), Doc(1, 1), Doc(2, 4), Doc(0, 6)], padding=2)  # borders at 3, 4, 8 (a shard's end), 14


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["tokens", "tokens of the whole row", "documents"])
def test_shards_together_read_what_the_whole_row_does(form: str, size: int) -> None:
    """ms-swift#9973, #7204: nothing is shifted twice or out of its shard, also over the border of a document."""
    batch = dict(ROW)
    if form != "tokens":
        del batch["source_ids"]
        batch["source_id"] = ROW["source_ids"] if form != "documents" else ROW["document_keys"][:, 0]
    whole = reader()
    targets = whole.slots_of_targets(batch, ROW["input_ids"])
    tokens = whole.slots_of_tokens(batch, ROW["input_ids"])
    assert targets[0, :-1].tolist() == ROW["source_ids"][0, 1:].tolist()
    parts = []
    for rank in range(size):
        part = {key: value.chunk(size, 1)[rank] if key in TOKEN_KEYS else value for key, value in batch.items()}
        one = reader(sp_rank=rank, sp_size=size)
        parts.append((one.slots_of_targets(part, part["input_ids"]), one.slots_of_tokens(part, part["input_ids"])))
    assert torch.equal(torch.cat([part[0] for part in parts], 1), targets)
    assert torch.equal(torch.cat([part[1] for part in parts], 1), tokens)


def test_documents_are_counted_once_a_row() -> None:
    device = torch.device("cpu")
    assert reader().slots_of_samples(ROW, device).tolist() == [0, 1, 2, 0, -1]
    assert reader(sp_rank=1, sp_size=2).slots_of_samples(ROW, device).tolist() == []
    assert reader().slots_of_samples({"source_id": [1, 2]}, device).tolist() == [1, 2]


def test_padding_is_no_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    slots = reader().slots_of_tokens({"source_id": [0, 1], "attention_mask": mask}, LIKE)
    assert slots.tolist() == [[0, 0, -1, -1], [1] * 4]


def positions(batch: Any, like: Any = LIKE) -> list[list[str]]:
    by_position = BatchReader(SourceTable(POSITION_NAMES), "position")
    return [[POSITION_NAMES[slot] for slot in line] for line in by_position.slots_of_targets(batch, like).tolist()]


def test_ranges_of_positions_are_the_targets() -> None:
    ends = torch.tensor([[0, 4094, 4095, 2**16 - 1, 2**20 - 2, 2**20 - 1, 2**22]])
    found = ["0-4K", "0-4K", "4K-16K", "64K-128K", "512K-1M", "over-1M", "over-1M"]
    assert positions({"position_ids": ends}, torch.zeros(1, 7)) == [found]
    assert positions({"position_ids": torch.stack([ends * 0, ends])}, torch.zeros(1, 7)) == [found]
    assert positions({}) == [["0-4K"] * 4] * 2
    mask = torch.cat([torch.zeros(1, 5000), torch.ones(1, 4096)], 1).long()  # padded on the left
    assert {name for line in positions({"attention_mask": mask}, torch.zeros(1, 9096)) for name in line[:-1]} == {
        "0-4K"
    }


def test_names_go_with_ids() -> None:
    ids, names = reader().named_ids({"ds_idx": torch.tensor([4, 2]), "name": ("x", "y")}, "name")
    assert (ids.tolist(), names) == ([4, 2], ["x", "y"])
    with pytest.raises(BatchContractError, match="must name each source id"):
        reader().named_ids({"ds_idx": torch.tensor([4, 2]), "name": ["x"]}, "name")
