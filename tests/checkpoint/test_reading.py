"""Loading: onto other layouts, of tied tensors, of other people's directories, and of malicious ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.plain import load_plain, snapshot, to_bytes
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.writer import SaveRequest
from lightning_longctx.errors import CheckpointError
from tests.checkpoint.helpers import writer
from tests.helpers.pool import run_ranks


def _save(root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    checkpoints = writer(root)
    checkpoints.save(SaveRequest(1, {"weights": tensors}, {}))
    checkpoints.drain()
    checkpoints.raise_failure()
    if checkpoints.world_size > 1:
        dist.barrier()
    return scan(root)[0].path / "weights"


def test_values_types_and_shapes_come_back(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(100, 10).bfloat16(),
        "f64": torch.randn(3, dtype=torch.float64),
        "ints": torch.arange(5),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(40, 30).t(),
        "view": torch.randn(1000)[10:20],
    }
    folder = TensorDirectory(_save(tmp_path, tensors))
    assert sorted(folder) == sorted(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(folder.read(key), tensor), key
        assert folder[key].dtype == tensor.dtype


def test_a_view_is_stored_at_its_own_size(tmp_path: Path) -> None:
    folder = _save(tmp_path, {"view": torch.randn(10**6)[:1000]})
    assert (folder / "__0_0.distcp").stat().st_size < 10**4


def test_tied_tensors_are_stored_once_and_found_by_both_names(tmp_path: Path) -> None:
    table = torch.randn(100, 10)
    folder = TensorDirectory(_save(tmp_path, {"embedding": table, "head": table}))
    assert folder.aliases == {"head": "embedding"}
    assert torch.equal(folder.read("head"), table)
    assert (folder.folder / "__0_0.distcp").stat().st_size < 2 * table.nbytes


def test_torch_reads_what_is_not_packed(tmp_path: Path) -> None:
    tensor = torch.randn(100, 10)
    folder = _save(tmp_path, {"w": tensor})
    target = {"w": torch.zeros(100, 10)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["w"], tensor)


def test_reads_what_torch_wrote(tmp_path: Path) -> None:
    tensors: Any = {"a": {"w": torch.randn(10, 4)}, "b": torch.arange(6), "settings": [{"lr": 0.1}]}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(tensors, checkpoint_id=tmp_path / "stock")
    folder = TensorDirectory(tmp_path / "stock", foreign=True)
    assert folder.values_below("settings.") == {"0.lr": 0.1}
    with pytest.raises(CheckpointError, match="must hold tensors only"):
        TensorDirectory(tmp_path / "stock")
    assert torch.equal(folder.read("a.w"), tensors["a"]["w"])
    assert torch.equal(folder.read("b"), tensors["b"])  # type: ignore[arg-type]


def test_a_missing_name_and_another_size_are_named(tmp_path: Path) -> None:
    folder = TensorDirectory(_save(tmp_path, {"w": torch.randn(4, 4)}))
    with pytest.raises(CheckpointError, match="`v` must be in"):
        folder.read("v")
    with pytest.raises(CheckpointError, match=r"`w` must have the saved size \(4, 4\), but got \(4, 5\)"):
        folder.read_into({"w": torch.empty(4, 5)})


# -- other layouts -----------------------------------------------------------------------------------------------------


def _tensor(number: int) -> torch.Tensor:
    return torch.arange(7 * (number + 1) * 5, dtype=torch.float32).view(7 * (number + 1), 5) + number


def _save_sharded(root: str, placements: str) -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]}[placements]
    tensors: dict[str, Any] = {f"t{n}": distribute_tensor(_tensor(n), mesh, kinds) for n in (0, 9)}
    tensors["tied"] = tensors["t9"]
    tensors["whole"] = _tensor(20)
    _save(Path(root), tensors)
    return sum(file.stat().st_size for file in Path(root).glob("step-*/weights/*.distcp"))


def _load_sharded(root: str) -> list[bool]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folder = TensorDirectory(scan(root)[0].path / "weights")
    equal = []
    for kind in (Shard(0), Shard(1), Replicate()):
        targets: dict[str, torch.Tensor] = {
            f"t{n}": distribute_tensor(torch.zeros(_tensor(n).shape), mesh, [kind]) for n in (0, 9)
        }
        targets["whole"] = torch.zeros(_tensor(20).shape)
        targets["tied"] = torch.zeros(_tensor(9).shape)
        folder.read_into(targets)
        wanted = {"t0": _tensor(0), "t9": _tensor(9), "whole": _tensor(20), "tied": _tensor(9)}
        for key, target in targets.items():
            full = target.full_tensor() if isinstance(target, DTensor) else target
            equal.append(torch.equal(full, wanted[key]))
    return equal


@pytest.mark.distributed
@pytest.mark.parametrize("placements", ["rows", "columns", "copies"])
def test_two_ranks_to_one_three_and_four(tmp_path: Path, placements: str) -> None:
    run_ranks(_save_sharded, 2, str(tmp_path), placements)
    size = sum(file.stat().st_size for file in tmp_path.glob("step-*/weights/*.distcp"))
    values = sum(_tensor(n).nbytes for n in (0, 9, 20))
    assert size < values + 12_000, "every value is written once, by one rank"
    for ranks in (1, 3, 4):
        for equal in run_ranks(_load_sharded, ranks, str(tmp_path)):
            assert equal == [True] * 12


# -- malicious ---------------------------------------------------------------------------------------------------------


class _Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


def test_malicious_metadata_runs_nothing(tmp_path: Path) -> None:
    folder = _save(tmp_path, {"w": torch.randn(4)})
    (folder / ".metadata").write_bytes(pickle.dumps({"x": _Attack()}))
    with pytest.raises(CheckpointError, match="asks for posix.system"):
        TensorDirectory(folder)
    assert not Path("owned").exists()
    with pytest.raises(CheckpointError, match="must be DCP metadata"):  # asked for: it runs, and is no metadata
        TensorDirectory(folder, trust_pickle=True)
    assert Path("owned").exists()


def test_malicious_tensors_and_extra_state_run_nothing(tmp_path: Path) -> None:
    folder = _save(tmp_path, {"w": torch.randn(1000)})
    torch.save({"x": _Attack()}, tmp_path / "extra.pt")
    with pytest.raises(CheckpointError, match="must hold plain values"):
        load_plain(tmp_path / "extra.pt")
    (folder / "__0_0.distcp").write_bytes((tmp_path / "extra.pt").read_bytes())
    with pytest.raises(CheckpointError):
        TensorDirectory(folder).read("w")
    assert not Path("owned").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_metadata_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    folder = _save(tmp_path, {"w": torch.randn(1000)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="must name files of its own"):
        TensorDirectory(folder)


# -- extra state -------------------------------------------------------------------------------------------------------


def test_plain_state_comes_back(tmp_path: Path) -> None:
    from collections import OrderedDict, defaultdict

    import numpy

    state = {
        "numbers": [1, 2.5, True, None, "text", b"bytes", (1, 2)],
        "ordered": OrderedDict(a=1),
        "default": defaultdict(int, a=2),
        "types": [torch.float32, torch.device("cpu"), torch.Size([2])],
        3: numpy.float64(1.5),
        (1, "a"): torch.arange(3)[1:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    (tmp_path / "extra.pt").write_bytes(to_bytes(snapshot(state, "extra")))
    back = load_plain(tmp_path / "extra.pt")
    assert back["numbers"] == state["numbers"]
    assert (back["ordered"], back["default"], back["types"]) == ({"a": 1}, {"a": 2}, state["types"])
    assert back[3] == 1.5
    assert torch.equal(back[(1, "a")], torch.tensor([1, 2]))


@pytest.mark.parametrize("value", [{1, 2}, Path("x"), lambda: 1, _Attack()])
def test_what_could_not_be_loaded_is_refused_when_saving(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\['mine'\]\[0\]"):
        snapshot({"mine": [value]}, "callbacks")


def test_a_snapshot_is_a_copy() -> None:
    tensor, inner = torch.zeros(2), [1]
    copied = snapshot({"t": tensor, "l": inner}, "x")
    tensor.fill_(1)
    inner.append(2)
    assert torch.equal(copied["t"], torch.zeros(2))
    assert copied["l"] == [1]
