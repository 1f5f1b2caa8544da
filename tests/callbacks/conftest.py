"""Settings of the callback tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_group_left() -> Iterator[None]:
    """End the process group of a strategy: Lightning would take the next run on one device for a distributed one."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
