"""Notes in ``.staging/``: who is writing, removing or reading a checkpoint, and whether that process is gone."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from lightning_longctx.checkpoint.address import Folder, names_in
from lightning_longctx.checkpoint.layout import LEASE, STAGING, TOMBSTONE, is_owner_file, owner_file

__all__ = ["is_abandoned", "leased", "owner_note"]

# Whether the owner still lives can only be asked on its own machine; elsewhere silence for so long means no.
_SILENCE_SECONDS = 3600.0
# On a store a folder has no time: the note says when a write began, and that one may be long.
_STORE_SILENCE_SECONDS = 24 * 3600.0


def owner_note() -> bytes:
    """Who writes, removes or reads: host, process, boot; and when it began."""
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot_id(), "time": time.time()}
    return json.dumps(facts).encode()


def is_abandoned(entry: Folder) -> bool:
    """Whether an entry of the staging folder belongs to nobody any more.

    Args:
        entry: a directory that was being written, the note of its owner, a lease, or a tombstone.
    """
    if entry.name.startswith(TOMBSTONE):
        return True
    if entry.name.startswith(LEASE):
        return not _is_fresh(entry, _SILENCE_SECONDS)
    owner = _facts(entry if is_owner_file(entry.name) else entry.with_name(owner_file(entry.name)))
    if owner.get("host") != socket.gethostname():  # or no note: another rank was ahead of the first one
        return not _is_fresh(entry, _SILENCE_SECONDS if isinstance(entry, Path) else _STORE_SILENCE_SECONDS)
    return owner.get("boot") != _boot_id() or not _is_alive(int(owner.get("pid", -1)))


def leased(root: Folder) -> set[str]:
    """Names of the checkpoints that are being read."""
    leases = [name for name in names_in(root / STAGING) if name.startswith(LEASE)]
    fresh = [name for name in leases if _is_fresh(root / STAGING / name, _SILENCE_SECONDS)]
    return {name.removeprefix(LEASE).rpartition("-")[0] for name in fresh}


def _is_fresh(entry: Folder, seconds: float) -> bool:
    """Whether there was a sign of life. What went meanwhile needs nobody to look after it, like what is fresh."""
    if isinstance(entry, Path):
        try:
            return time.time() - entry.stat().st_mtime <= seconds
        except FileNotFoundError:
            return True
    return time.time() - float(_facts(entry).get("time", time.time())) <= seconds


def _facts(note: Folder) -> dict[str, Any]:
    try:
        content = json.loads(note.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # nothing of this process is under way when it starts
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
