"""One save, from its staging directory to the commit. The second half runs on the first rank alone.

Nothing is a checkpoint before the file system publishes it, as the last step, after every byte and every name inside
it is durable: by giving the directory its final name, or, on a store that cannot rename, by the record itself. So
whatever dies, whenever: either the checkpoint is whole, or it never was.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_longctx.checkpoint.address import Folder, file_sizes
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import LATEST, Commit, FileFacts, done_marker, seal
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

    def __init__(self, filesystem: FileSystem, root: Folder, record: Commit, jobs: Iterable[str]) -> None:
        self.filesystem = filesystem
        self.root = root
        self.record = record
        self.place = filesystem.place_of(root, record.name)
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
                # Also after it was published: it may be visible and yet not durable, so it is not reported as saved.
                self._error = self._error or f"rank 0: {describe(error)}"
                committed = False
        return {"error": self._error, "committed": committed}

    def _complete(self, job: str, results: Sequence[Mapping[str, Any]], index: SlotIndex) -> bool:
        slots = [result["slot"] for result in results if result.get("slot")]
        files = {f"{job}/{part['file']}": FileFacts(**part["facts"]) for part in slots}
        extras = [result["extra"] for result in results if result.get("extra")]
        files |= {part["file"]: FileFacts(**part["facts"]) for part in extras}
        self._check_sizes(files)
        if slots:
            files |= self._write_index(job, index.files(slots))
            marker = seal({"slot": job, "files": {name: asdict(facts) for name, facts in files.items()}})
            size, crc32 = self.filesystem.replace(self.place / done_marker(job), marker)
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
            size, crc32 = self.filesystem.write(self.place / slot / name, content)
            files[f"{slot}/{name}"] = FileFacts(size, crc32)
        self.filesystem.sync_directory(self.place / slot)
        return files

    def _check_sizes(self, files: Mapping[str, FileFacts]) -> None:
        for name, found in file_sizes(self.place, files):
            if found is None:
                fix = "Put `dirpath` on a store that all nodes share."
                raise CheckpointError(name, "must be there for the first rank", f"none in {self.place}", fix)
            if found != files[name].size:
                fix = "The store lost bytes; look at its health."
                raise CheckpointError(name, f"must have {files[name].size} bytes", found, fix)

    def _commit(self) -> None:
        filesystem = self.filesystem
        record = replace(self.record, files=dict(sorted(self._files.items())))
        if any(name.startswith("extra/") for name in self._files):
            filesystem.sync_directory(self.place / "extra")
        filesystem.publish(self.root, record.name, record.to_bytes(), self._decide)
        self.record = record
        latest = {"checkpoint": record.name, "step": record.step, "resumable": record.resumable}
        filesystem.replace(self.root / LATEST, json.dumps(latest).encode() + b"\n")

    def _decide(self) -> None:
        with self._deciding:
            if self._error is not None:
                fix = "Save again."
                raise CheckpointError(self.record.name, "must not be given up before its commit", self._error, fix)
            self._committing = True


def describe(error: BaseException) -> str:
    """An error as text that may travel between ranks.

    Example:
        >>> describe(ValueError("x"))
        'ValueError: x'
    """
    return f"{type(error).__name__}: {error}"
