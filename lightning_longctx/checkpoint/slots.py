"""A slot: its own buffers, thread and group, and at most one write under way.

Two slots make the optimizer's long write no business of the weights'. They need two groups: on one, the exchanges of
two threads meet in any order, and each waits for the other.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.attempt import Attempt, describe
from lightning_longctx.checkpoint.exchange import all_gather_json, broadcast_json, gather_json
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import FileFacts, extra_file, owner_file, stage_of_rank
from lightning_longctx.checkpoint.notes import owner_note
from lightning_longctx.checkpoint.plain import to_bytes
from lightning_longctx.checkpoint.slot_files import SlotIndex, write_rank_file
from lightning_longctx.checkpoint.staging import StagedTensors, StagingBuffers
from lightning_longctx.errors import CheckpointError

__all__ = ["Job", "Slot"]


@dataclass
class Job:
    """One slot's part of a save.

    Attributes:
        attempt: the save.
        name: of the part; a slot's, or ``extra``.
        staged: tensors to write; None for extra state alone.
        extra: extra state to write; None if another job does.
        error: why this rank has nothing to write; it takes part so that nobody waits for it.
        finished: set once there is a verdict.
        committed: whether this part completed the checkpoint.
        seconds: from the start of the save to the verdict.
        size: bytes that this rank wrote.
    """

    attempt: Attempt
    name: str
    staged: StagedTensors | None
    extra: Any | None = None
    error: str | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    committed: bool = False
    seconds: float = 0.0
    size: int = 0


class Slot:
    """One slot on one rank.

    Args:
        name: ``weights`` or ``optimizer``.
        rank: this rank.
        buffers: where its tensors are staged.
        stage_dir: a node-local folder where files are written before they are copied; None: written in place.
        done: called on the slot's thread after each job.
    """

    def __init__(
        self, name: str, rank: int, buffers: StagingBuffers, stage_dir: Path | None, done: Callable[[Job], None]
    ) -> None:
        self.name = name
        self.buffers = buffers
        self.group: dist.ProcessGroup | None = None
        self.broken = False  # its group is unusable: a transport error, or a job that never ended
        self._rank = rank
        self._stage_dir = stage_dir
        self._done = done
        self._index = SlotIndex()
        self._job: Job | None = None

    @property
    def pending(self) -> Job | None:
        """The write under way."""
        return self._job if self._job is not None and not self._job.finished.is_set() else None

    def wait(self, seconds: float) -> bool:
        """Wait until no write is under way; False if it takes longer."""
        return self._job is None or self._job.finished.wait(seconds)

    def give_up(self, error: str) -> None:
        """Forget a write that does not end. Its thread may go on, but it cannot commit any more."""
        if (job := self.pending) is not None:
            job.attempt.fail(error)
            self.broken = True
            self._job = None
            self.buffers = self.buffers.renewed()  # the thread may still read the old ones
            self._done(job)

    def submit(self, job: Job) -> None:
        """Start a write. The one before must have ended."""
        assert self.pending is None
        self._job = job
        # A daemon, so that a store that hangs cannot keep the process from ending.
        threading.Thread(target=self._run, args=(job, self.group), name=f"checkpoint-{self.name}", daemon=True).start()

    def _run(self, job: Job, group: dist.ProcessGroup | None) -> None:
        verdict: dict[str, Any] = {"error": "ended without a verdict", "committed": False}
        try:
            self._check_identity(job, group)
            results = gather_json(self._write(job), group)
            if results is not None:
                verdict = job.attempt.finish(job.name, results, self._index)
            verdict = broadcast_json(verdict, group)
        except CheckpointError as error:
            verdict["error"] = describe(error)
        except (RuntimeError, ValueError, OSError) as error:  # gloo: a dead peer, a time limit, a lost group
            verdict["error"] = f"rank {self._rank} lost the others: {describe(error)}"
            self.broken = self.broken or self._job is job
        finally:
            if verdict["error"]:
                job.attempt.fail(verdict["error"])
            job.committed = verdict["committed"]
            job.seconds = time.monotonic() - job.attempt.started
            if self._job is job:  # else it was given up, and told then
                self._done(job)
            job.finished.set()

    def _check_identity(self, job: Job, group: dist.ProcessGroup | None) -> None:
        own = [self.name, job.name, job.attempt.record.name]
        for rank, other in enumerate(all_gather_json(own, group)):
            if other != own:
                fix = "Every rank must save the same slots at the same steps."
                raise CheckpointError(f"rank {rank}", f"must write {own}", other, fix)

    def _write(self, job: Job) -> dict[str, Any]:
        """Write this rank's files; an error becomes text, since the other ranks wait for an answer."""
        if job.error:
            return {"error": job.error}
        attempt, result = job.attempt, dict[str, Any]()
        if attempt.error:
            return {"error": attempt.error}
        try:
            with _Workplace(attempt.filesystem, attempt.place, self._stage_dir) as place:
                if job.staged is not None:
                    result["slot"] = write_rank_file(place.filesystem, place.folder / job.name, self._rank, job.staged)
                    place.deliver(f"{job.name}/{result['slot']['file']}", FileFacts(**result["slot"]["facts"]))
                if job.extra is not None:
                    result["extra"] = self._write_extra(place, job.extra)
        except Exception as error:  # whatever it is, the others must hear of it
            return {"error": describe(error)}
        job.size = sum(part["facts"]["size"] for part in result.values())
        return result

    def _write_extra(self, place: _Workplace, extra: Any) -> dict[str, Any]:
        name = extra_file(self._rank)
        place.filesystem.make_directory((place.folder / name).parent)
        size, crc32 = place.filesystem.write(place.folder / name, to_bytes(extra))
        facts = FileFacts(size, crc32)
        place.deliver(name, facts)
        return {"file": name, "facts": asdict(facts)}


class _Workplace:
    """Where files are written: where they belong, or a node-local folder first."""

    def __init__(self, filesystem: FileSystem, target: Folder, stage_dir: Path | None) -> None:
        self._filesystem = filesystem
        self._target = target
        self._local = stage_dir is not None
        self.filesystem, self.folder = filesystem, target
        if stage_dir is not None:
            self.filesystem = FileSystem()
            self.folder = stage_dir / stage_of_rank(target.name)

    def __enter__(self) -> _Workplace:
        if self._local:  # a later start removes what a process that is gone has left
            self.filesystem.make_directory(self.folder.parent)
            self.filesystem.note(self.folder.with_name(owner_file(self.folder.name)), owner_note())
        return self

    def __exit__(self, *error: object) -> None:
        if self._local:
            self.filesystem.remove_tree(self.folder)
            self.filesystem.remove_file(self.folder.with_name(owner_file(self.folder.name)))

    def deliver(self, name: str, facts: FileFacts) -> None:
        """Copy a file to where it belongs, and compare what arrived."""
        local, target = self.folder / name, self._target / name
        if not isinstance(local, Path) or not self._local:
            return
        self._filesystem.make_directory(target.parent)
        with local.open("rb") as source, self._filesystem.create(target) as stream:
            shutil.copyfileobj(source, stream, 16 * 2**20)
        if (stream.size, stream.crc32) != (facts.size, facts.crc32):
            fix = "The node-local folder returned other bytes than were written; look at its disk."
            raise CheckpointError(name, "must be copied as it was written", "another checksum", fix)
