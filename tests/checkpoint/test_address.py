"""Addresses of stores: read like folders of this machine, and never mistaken for empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.checkpoint.address import Address, as_folder, is_address
from lightning_longctx.checkpoint.discovery import find_latest, is_checkpoint, scan, verify
from lightning_longctx.checkpoint.export import export_checkpoint
from lightning_longctx.checkpoint.layout import COMMIT, STAGING, checkpoint_name, done_marker, owner_file
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.writer import SaveRequest
from lightning_longctx.errors import CheckpointError, ConfigurationError
from tests.checkpoint.helpers import GONE, check_pure, owners_note, put, save, steps, writer
from tests.checkpoint.objects import ObjectsFileSystem

# -- addresses ---------------------------------------------------------------------------------------------------------


def test_an_address_and_a_path() -> None:
    assert as_folder("file:///a/b") == as_folder("local:///a/b") == Path("/a/b")
    assert as_folder("a/b") == Path("a/b")
    assert not is_address("file://a")
    one = as_folder("memory://runs/a/")
    assert isinstance(one, Address)
    assert (str(one), one.name, str(one / "b"), str(one.parent)) == (
        "memory://runs/a",
        "a",
        "memory://runs/a/b",
        "memory://runs",
    )
    assert one == as_folder("memory:///runs/a") != as_folder("memory:///runs/b")
    assert len({one, as_folder(str(one))}) == 1
    assert one != as_folder(f"objects://{one.path}")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("nowhere://a", "must be an address that fsspec can open, but got nowhere://a: .*Protocol not known"),
        ("oci://bucket/a", "needs a package for such addresses, but got oci://bucket/a. Install ocifs"),
        ("memory://", "must name a folder"),
        (Path("s3://bucket/run"), "must not be an address as a `Path`.* Give it as text: `s3://bucket/run`"),
        ("", "must be a folder"),
        (5, "must be a folder, but got 5"),
    ],
)
def test_an_address_that_cannot_be_used_is_told(address: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`dirpath` {text}"):
        as_folder(address, "dirpath")


def test_an_address_with_settings_of_its_own_is_refused() -> None:
    class Elsewhere:
        storage_options = {"key": "x"}

        def __str__(self) -> str:
            return "memory://a"

    with pytest.raises(ConfigurationError, match="without settings of its own"):
        as_folder(Elsewhere())  # type: ignore[arg-type]


def test_no_answer_is_not_taken_for_nothing_there(root: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fsspec's own `exists` does: an error of the network would have a committed checkpoint collected."""

    class NoCredentials(Exception):
        """As botocore has them: no OSError."""

    checkpoints = writer(root)
    save(checkpoints, 1)
    name = scan(root)[0].path.name
    put(root / STAGING / owner_file(name), owners_note(**GONE))

    def fails(*_: Any, **__: Any) -> None:
        raise NoCredentials("unable to locate credentials")

    for methods in (["info"], ["ls"], ["cat_file", "info"]):
        with monkeypatch.context() as patch:
            for method in methods:
                patch.setattr(type(root.system), method, fails)
            if methods != ["info"]:
                with pytest.raises(CheckpointError, match="must be a folder that can be read, but got NoCredentials"):
                    find_latest(root)
            if "cat_file" not in methods:  # a note that cannot be read says nothing of its owner
                with pytest.raises(CheckpointError, match="NoCredentials: unable to locate credentials"):
                    writer(root)
    assert check_pure(root) == [1]


# -- finding and reading -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_what_has_no_record_is_no_checkpoint_and_no_fault(root: Address) -> None:
    assert find_latest(root) is None
    put(root / checkpoint_name(7, "aaaaaaaa") / "weights" / "__0_0.distcp", b"x")
    assert scan(root) == []
    assert find_latest(root) is None
    save(writer(root), 5)
    assert steps(root) == [5]
    found = find_latest(root)
    assert found is not None
    assert is_checkpoint(str(found.path))
    assert is_checkpoint(str(found.path / COMMIT)), "Lightning is given the record, which has a time"


@pytest.mark.parametrize("damage", [COMMIT, "weights/.metadata", done_marker("optimizer")])
def test_a_damaged_one_falls_back(root: Address, damage: str) -> None:
    checkpoints = writer(root)
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = scan(root)[0].path
    put(newest / damage, b"{}")
    with pytest.warns(UserWarning, match="Falling back to step-00000001"):
        found = find_latest(root)
    assert found is not None
    assert found.path.name.startswith("step-00000001")
    (newest / damage).system.rm_file((newest / damage).path)  # type: ignore[union-attr]
    assert verify(newest) != ""


def test_a_flipped_bit_is_found(root: Address) -> None:
    save(writer(root), 1)
    file = scan(root)[0].path / "weights" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    put(file, bytes(content))
    assert verify(scan(root)[0].path) == "weights/__0_0.distcp has a wrong checksum"


def test_a_tensor_is_read_without_the_rest_of_its_file(tmp_path: Path) -> None:
    root = as_folder(f"objects://{tmp_path}/run")
    checkpoints = writer(root)
    tensors = {f"w{n}": torch.full((1000,), float(n)) for n in range(20)}
    checkpoints.save(SaveRequest(1, {"weights": tensors}, {}))
    checkpoints.drain()
    checkpoints.raise_failure()
    folder = TensorDirectory(scan(root)[0].path / "weights")
    ObjectsFileSystem.reads.clear()
    assert torch.equal(folder.read("w7"), tensors["w7"])
    ((name, size),) = ObjectsFileSystem.reads
    assert name == "__0_0.distcp"
    assert size < 2 * tensors["w7"].nbytes


def test_a_file_that_cannot_be_read_is_named(root: Address) -> None:
    save(writer(root), 1)
    folder = TensorDirectory(scan(root)[0].path / "weights")
    file = scan(root)[0].path / "weights" / "__0_0.distcp"
    file.system.rm_file(file.path)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="__0_0.distcp` must be readable, but got No such file"):
        folder.read("weights.large")


def test_an_export_stays_here(root: Address) -> None:
    save(writer(root), 1)
    with pytest.raises(CheckpointError, match="must be a path of this machine"):
        export_checkpoint(str(scan(root)[0].path), "s3://bucket/model")
    assert not Path("s3:").exists()
