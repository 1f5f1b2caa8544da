"""One save, from its staging directory to the commit. The second half runs on the first rank alone.

Nothing is a checkpoint before the directory has its final name, and it gets that name once, as the last step, after
every byte and every name inside it is durable. So whatever dies, whenever: either the checkpoint is whole, or it never
was.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import (
    COMMIT,
    LATEST,
    STAGING,
    Commit,
    FileFacts,
    done_marker,
    owner_file,
    seal,
)
from lightning_longctx.checkpoint.slot_files import SlotIndex
from lightning_longctx.errors import CheckpointError

__all__ = ["Attempt", "describe"]


class Attempt:
    """One save on one rank.

    Args:
        filesystem: what to write through.
        root: the folder of checkpoints.
        record: what the checkpoint will hold; its files are added.
        jobs: names of the parts that must be there before the commit.
    """

    def __init__(self, filesystem: FileSystem, root: Path, record: Commit, jobs: Iterable[str]) -> None:
        self.filesystem = filesystem
        self.root = root
        self.record = record
        self.staging = root / STAGING / record.name
        self.final = root / record.name
        self.started = time.monotonic()
        self._missing = set(jobs)
        self._files: dict[str, FileFacts] = {}
        self._finishing = threading.Lock()  # one part at a time; held while files are written
        self._deciding = threading.Lock()  # held for a moment; guards the two fields below
        self._error: str | None = None
        self._committing = False

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        return self._error

    def fail(self, error: str) -> bool:
        """Make sure that it is never committed; the first error stays. False if the commit is under way already."""
        with self._deciding:
            if not self._committing and self._error is None:
                self._error = error
            return not self._committing

    def finish(self, job: str, results: Sequence[Mapping[str, Any]], index: SlotIndex) -> dict[str, Any]:
        """On the first rank: complete one part with what the ranks wrote, and commit if it was the last.

        Args:
            job: name of the part.
            results: of each rank, by rank: ``error``, or ``slot`` and ``extra`` with the facts of its files.
            index: makes the index of the slot.

        Returns:
            The verdict for all ranks: ``error`` (a text, or None) and ``committed``.
        """
        errors = [f"rank {rank}: {result['error']}" for rank, result in enumerate(results) if result.get("error")]
        if errors:
            self.fail("; ".join(errors))
        with self._finishing:
            try:
                committed = self._error is None and self._complete(job, results, index)
            except Exception as error:  # whatever it is, the other ranks wait for a verdict
                # Also after the rename: it may be visible and yet not durable, so it is not reported as saved.
                self._error = self._error or f"rank 0: {describe(error)}"
                committed = False
        return {"error": self._error, "committed": committed}

    @staticmethod
    def discard_directory(filesystem: FileSystem, staging: Path) -> None:
        """Remove what a failed attempt has left. What cannot be removed now waits for the next start."""
        tombstone = staging.with_name(f"del-{staging.name}")
        try:
            filesystem.rename(staging, tombstone)
            filesystem.remove_tree(tombstone)
            filesystem.remove_tree(staging.with_name(owner_file(staging.name)))
        except OSError:
            return

    def _complete(self, job: str, results: Sequence[Mapping[str, Any]], index: SlotIndex) -> bool:
        slots = [result["slot"] for result in results if result.get("slot")]
        files = {f"{job}/{part['file']}": FileFacts(**part["facts"]) for part in slots}
        extras = [result["extra"] for result in results if result.get("extra")]
        files |= {part["file"]: FileFacts(**part["facts"]) for part in extras}
        self._check_sizes(files)
        if slots:
            files |= self._write_index(job, index.files(slots))
            marker = seal({"slot": job, "files": {name: asdict(facts) for name, facts in files.items()}})
            size, crc32 = self.filesystem.replace(self.staging / done_marker(job), marker)
            files[done_marker(job)] = FileFacts(size, crc32)
        self._files |= files
        self._missing.discard(job)
        if self._missing:
            return False
        self._commit()
        return True

    def _write_index(self, slot: str, contents: Mapping[str, bytes]) -> dict[str, FileFacts]:
        files = {}
        for name, content in contents.items():
            size, crc32 = self.filesystem.write(self.staging / slot / name, content)
            files[f"{slot}/{name}"] = FileFacts(size, crc32)
        self.filesystem.sync_directory(self.staging / slot)
        return files

    def _check_sizes(self, files: Mapping[str, FileFacts]) -> None:
        for name, facts in files.items():
            try:
                found = (self.staging / name).stat().st_size
            except FileNotFoundError as error:
                fix = "Put `dirpath` on a store that all nodes share."
                raise CheckpointError(name, "must be there for the first rank", error, fix) from error
            if found != facts.size:
                fix = "The store lost bytes; look at its health."
                raise CheckpointError(name, f"must have {facts.size} bytes", found, fix)

    def _commit(self) -> None:
        filesystem = self.filesystem
        record = replace(self.record, files=dict(sorted(self._files.items())))
        if (self.staging / "extra").is_dir():
            filesystem.sync_directory(self.staging / "extra")
        filesystem.replace(self.staging / COMMIT, record.to_bytes())
        with self._deciding:
            if self._error is not None:
                raise CheckpointError(record.name, "must not be given up before its commit", self._error, "Save again.")
            self._committing = True
        filesystem.rename(self.staging, self.final)
        filesystem.sync_directory(self.root)
        filesystem.sync_directory(self.staging.parent)
        filesystem.remove_tree(self.staging.with_name(owner_file(record.name)))
        self.record = record
        latest = {"checkpoint": record.name, "step": record.step, "resumable": record.resumable}
        filesystem.replace(self.root / LATEST, json.dumps(latest).encode() + b"\n")


def describe(error: BaseException) -> str:
    """An error as text that may travel between ranks.

    Example:
        >>> describe(ValueError("x"))
        'ValueError: x'
    """
    return f"{type(error).__name__}: {error}"
