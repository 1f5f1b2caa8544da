"""Settings of the whole test session: offline, one thread, each test in its own folder, one pool of processes."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before any import of a library that reads it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _pytest.config import parse_warning_filter  # noqa: E402

from tests.helpers import pool  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Give the processes of the pool the same warning filters as this one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs behind it deaf to Ctrl-C, and what that starts is deaf too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    pool.set_warning_filters([parse_warning_filter(text, escape=False) for text in config.getini("filterwarnings")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first, then those on several processes, then the slow ones."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is not None for name in ("slow", "distributed")])


def pytest_sessionfinish() -> None:
    """End the pool."""
    pool.close_pool()


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder: a Trainer writes logs and checkpoints where it stands."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """End the process group of a strategy, and forget what it set: the next run would take itself for one of many."""
    before = dict(os.environ)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
