"""S3 itself, as far as a server of this machine is S3: optional, with the real client (s3fs) and moto's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_longctx.checkpoint.address import as_folder
from lightning_longctx.checkpoint.discovery import find_latest, scan, verify
from lightning_longctx.checkpoint.layout import COMMIT, STAGING
from lightning_longctx.checkpoint.object_store import ObjectStore
from lightning_longctx.checkpoint.reading import TensorDirectory
from lightning_longctx.checkpoint.writer import SaveRequest
from lightning_longctx.cli import main
from lightning_longctx.errors import CheckpointError
from tests.callbacks.checkpoint_toy import assert_same, fit
from tests.checkpoint.helpers import GONE, check_pure, leftovers, owners_note, put, save, steps, writer

s3fs = pytest.importorskip("s3fs", reason="the client of S3 is not installed")
server = pytest.importorskip("moto.server", reason="`moto[server]` is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:::(moto|botocore|aiobotocore|werkzeug|s3fs)", "ignore:Training waited")
BUCKET = "s3://bucket"
PART = 5 * 2**20


@pytest.fixture(scope="module")
def _endpoint() -> Iterator[str]:
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(autouse=True)
def client(_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The environment of a run, and another client that writes and looks without the run's caches."""
    settings = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**settings, "ENDPOINT_URL": _endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", PART)
    s3fs.S3FileSystem.clear_instance_cache()
    other = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    other.mkdir("bucket")
    yield other
    other.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_resumed_run_is_an_unbroken_one(capfd: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"checkpoint": {"every_n_train_steps": 2}}
    whole = fit("whole", 10, **settings)
    fit(f"{BUCKET}/run", 5, **settings)
    assert_same(fit(f"{BUCKET}/run", 10, ckpt_path="last", **settings), whole)
    assert steps(f"{BUCKET}/run") == [10, 8, 5]
    assert leftovers(f"{BUCKET}/run") == []
    assert main(["checkpoint", "prune", f"{BUCKET}/run", "--keep-last", "1"]) == 0
    capfd.readouterr()
    assert main(["checkpoint", "list", f"{BUCKET}/run"]) == 0
    _, row = capfd.readouterr().out.splitlines()
    assert row.split()[:4] == ["10", "weights", "+", "optimizer"]
    assert main(["checkpoint", "verify", f"{BUCKET}/run", "--deep"]) == 0


def test_files_in_several_parts(client: Any) -> None:
    checkpoints = writer(f"{BUCKET}/run")
    tensors = {f"w{n}": torch.full((2**20,), float(n)) for n in range(5)}  # 20 MiB
    checkpoints.save(SaveRequest(1, {"weights": tensors}, {}))
    checkpoints.drain()
    checkpoints.raise_failure()
    found = scan(f"{BUCKET}/run")[0]
    assert verify(found.path) == ""
    folder = TensorDirectory(found.path / "weights")
    assert all(torch.equal(folder.read(key), value) for key, value in tensors.items())
    assert "-" in client.info(f"bucket/run/{found.path.name}/weights/__0_0.distcp")["ETag"], "one of several parts"


class _Breaks(ObjectStore):
    written = 0

    def before(self, operation: str, path: Any) -> None:
        if operation == "write" and path.name == "__0_0.distcp":
            self.written += 1
            if self.written == 4:
                raise OSError(5, "no answer")


def test_a_broken_upload_leaves_no_parts(client: Any) -> None:
    checkpoints = writer(f"{BUCKET}/run", _Breaks())
    checkpoints.save(SaveRequest(1, {"weights": {f"w{n}": torch.zeros(2**20) for n in range(9)}}, {}))
    checkpoints.drain()
    with pytest.raises(CheckpointError, match="no answer"):
        checkpoints.raise_failure()
    assert client.list_multipart_uploads("bucket") == []
    assert scan(f"{BUCKET}/run") == []
    save(writer(f"{BUCKET}/run"), 2)
    assert leftovers(f"{BUCKET}/run") == []


def test_what_others_write_and_remove_is_seen(client: Any) -> None:
    root = as_folder(f"{BUCKET}/run")
    save(writer(root), 1)
    save(writer(f"{BUCKET}/elsewhere"), 2)
    first, second = (scan(f"{BUCKET}/{folder}")[0].path.name for folder in ("run", "elsewhere"))
    assert (steps(root), leftovers(root)) == ([1], [])
    client.copy(f"bucket/elsewhere/{second}", f"bucket/run/{second}", recursive=True)
    assert sorted(check_pure(root)) == [1, 2]
    client.rm(f"bucket/run/{first}/{COMMIT}")
    assert check_pure(root) == [2]
    client.pipe_file(f"bucket/run/{STAGING}/{first}.owner", json.dumps(owners_note(**GONE)).encode())
    save(writer(root), 3)
    assert leftovers(root) == []
    assert check_pure(root) == [3, 2]


def test_what_s3_answers_is_told() -> None:
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        writer("s3://no-such-bucket/run")
    assert find_latest("s3://no-such-bucket/run") is None
    put(as_folder(f"{BUCKET}/run") / "LATEST.json", b"{}")
    assert find_latest(f"{BUCKET}/run") is None
    assert not Path("s3:").exists()
