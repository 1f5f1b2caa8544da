"""Saves from the side of training: agree, copy, go on; hear later what became of it.

All methods are called on the main thread, on every rank, in the same order. Only the copy into the buffers and one
small exchange happen here; what takes time happens on the slots' threads.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.attempt import Attempt, describe
from lightning_longctx.checkpoint.discovery import scan
from lightning_longctx.checkpoint.exchange import all_gather_json, broadcast_json
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import OPTIMIZER, SLOTS, STAGING, WEIGHTS, Commit, owner_file
from lightning_longctx.checkpoint.notes import owner_note
from lightning_longctx.checkpoint.object_store import filesystem_of
from lightning_longctx.checkpoint.retention import Retention, collect_garbage, collect_local, prune
from lightning_longctx.checkpoint.scores import read_scores
from lightning_longctx.checkpoint.slots import Job, Slot
from lightning_longctx.checkpoint.staging import PACK_BELOW, StagingBuffers
from lightning_longctx.errors import CheckpointError
from lightning_longctx.topology import new_host_group

__all__ = ["CheckpointWriter", "Outcome", "Receipt", "SaveRequest", "WriterSettings"]


@dataclass(frozen=True)
class WriterSettings:
    """How checkpoints are written.

    Args:
        timeout: how long a rank may keep the others waiting, and a write the next one of its slot. Default 10 minutes:
            PyTorch's own 30 would be half an hour without a word.
        pin: page-locked buffers, for copies from CUDA.
        pack_below: bytes of a shard below which tensors share a buffer.
        stage_dir: node-local folder for files before they are copied; None: written in place.
        retention: what is kept.
    """

    timeout: timedelta = timedelta(minutes=10)
    pin: bool = False
    pack_below: int = PACK_BELOW
    stage_dir: Path | None = None
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True)
class SaveRequest:
    """One save.

    Attributes:
        step: optimizer steps done.
        slots: tensors by name for each slot that is due; none: extra state alone.
        extra: this rank's extra state, already a copy.
        resumable: whether training can go on from here.
        trainable_only: the weights are those of trainable parameters only.
        place: data-parallel and sequence-parallel rank of this rank.
        accumulate: micro-batches of a step.
        error: why this rank cannot save; every rank then raises it.
    """

    step: int
    slots: Mapping[str, Mapping[str, Tensor]]
    extra: Any
    resumable: bool = True
    trainable_only: bool = False
    place: tuple[int, int] = (0, 0)
    accumulate: int = 1
    error: str | None = None


@dataclass(frozen=True)
class Receipt:
    """A save that has begun.

    Attributes:
        name: of the checkpoint that it becomes.
        resumable: whether training can go on from it.
        waited: seconds that training waited, by slot: for its previous write, and for the copy.
        blocked: of these, for previous writes.
    """

    name: str
    resumable: bool
    waited: Mapping[str, float]
    blocked: float


@dataclass(frozen=True)
class Outcome:
    """What became of one slot's write.

    Attributes:
        slot: ``weights`` or ``optimizer``; that of ``weights`` also writes extra state alone.
        checkpoint: the directory, once it is committed by this write; None before.
        step: of the save.
        seconds: from the start of the save to the verdict.
        size: bytes that this rank wrote.
    """

    slot: str
    checkpoint: Folder | None
    step: int
    seconds: float
    size: int


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder.

    Args:
        dirpath: the folder; the same on every rank, on a store that all ranks see.
        settings: how.
        filesystem: what to write through; None: what ``dirpath`` needs.
        versions: of libraries, for people who read the record.
    """

    def __init__(
        self,
        dirpath: Folder,
        settings: WriterSettings | None = None,
        filesystem: FileSystem | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.dirpath = dirpath
        self.settings = settings or WriterSettings()
        self.filesystem = filesystem or filesystem_of(dirpath)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.run = ""
        self.protected: set[str] = set()
        self._versions = dict(versions or {})
        self._lock = threading.Lock()
        self._failures: dict[str, str] = {}  # by checkpoint name, until they are raised
        self._told: set[str] = set()
        self._outcomes: list[Outcome] = []
        self._deleting = threading.Lock()
        self._control: dist.ProcessGroup | None = None
        self._open_jobs: dict[str, int] = {}
        buffers = StagingBuffers(self.rank, self.world_size, self.settings.pin, self.settings.pack_below)
        self.slots = {
            name: Slot(name, self.rank, buffers.renewed(), self.settings.stage_dir, self._finished) for name in SLOTS
        }

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self, run: str | None = None) -> None:
        """Make groups and folder, and remove what dead processes left.

        Args:
            run: id of the run that is continued; None: a new one.

        Raises:
            CheckpointError: the folder cannot be used; on every rank.
        """
        self._control = self._new_group(3 * self.settings.timeout)
        for slot in self.slots.values():
            slot.group = self._new_group(self.settings.timeout)
        if self.settings.stage_dir is not None:
            with suppress(OSError):  # the first save tells what is wrong with it
                collect_local(self.settings.stage_dir)
        agreed = {"error": None, "run": run or uuid4().hex[:8], "nonce": uuid4().hex, "sequence": 0}
        if self.rank == 0:
            try:
                self.filesystem.prepare(self.dirpath)
                collect_garbage(self.filesystem, self.dirpath)
                sequences = [found.commit.sequence for found in scan(self.dirpath) if found.commit]
                agreed["sequence"] = max(sequences, default=0)
            except (OSError, CheckpointError) as error:
                agreed["error"] = describe(error)
        agreed = broadcast_json(agreed, self._control)
        if agreed["error"]:
            fix = "Give a folder that can be written to."
            raise CheckpointError(str(self.dirpath), "must be a folder for checkpoints", agreed["error"], fix)
        self.run, self._nonce, self._sequence = agreed["run"], agreed["nonce"], int(agreed["sequence"])

    def close(self) -> None:
        """Leave the groups. Drain first."""
        groups = [self._control, *(slot.group for slot in self.slots.values() if not slot.broken)]
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._control = None

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(self, request: SaveRequest) -> Receipt:
        """Copy the state and start to write it.

        Raises:
            CheckpointError: this rank or another one cannot save; on every rank, before anything is written.
        """
        due = [name for name in SLOTS if name in request.slots]
        waited = {name: self._wait_for(self.slots[name]) for name in due or [WEIGHTS]}
        blocked = sum(waited.values())
        record = self._agree(request, due)
        attempt = Attempt(self.filesystem, self.dirpath, record, due or ["extra"])
        self._open_jobs[record.name] = len(due) or 1
        jobs = []
        for name in due:
            begin = time.monotonic()
            jobs.append((self.slots[name], self._staged_job(attempt, name, request)))
            waited[name] += time.monotonic() - begin
        if not due:
            jobs.append((self.slots[WEIGHTS], Job(attempt, "extra", None)))
        jobs[0][1].extra = request.extra
        for slot, job in jobs:
            slot.submit(job)
        return Receipt(record.name, record.resumable, waited, blocked)

    def _wait_for(self, slot: Slot) -> float:
        begin = time.monotonic()
        if not slot.wait(self.settings.timeout.total_seconds()):
            slot.give_up(f"rank {self.rank}: the {slot.name} were not written within {self.settings.timeout}")
        return time.monotonic() - begin

    def _agree(self, request: SaveRequest, due: list[str]) -> Commit:
        """Compare what ranks are about to save, and make sure that each can; one small exchange."""
        self._sequence += 1
        attempt = f"{zlib.crc32(f'{self._nonce}/{self._sequence}'.encode()):08x}"
        record = Commit(
            step=request.step,
            attempt=attempt,
            sequence=self._sequence,
            run=self.run,
            slots=due,
            resumable=request.resumable,
            trainable_only=request.trainable_only,
            ranks=[],
            accumulate=request.accumulate,
            versions=self._versions,
        )
        error = request.error or self._preflight(record.name, request)
        own = {"what": [record.name, due], "error": error, "place": list(request.place), "broken": self._broken()}
        answers = all_gather_json(own, self._control)
        self._renew({name for answer in answers for name in answer["broken"]})
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        if any(answer["what"] != answers[0]["what"] for answer in answers):
            errors.append(f"ranks save different things: {[answer['what'] for answer in answers]}")
        if errors:
            self._discard(record.name)
            fix = "Nothing was written; earlier checkpoints are untouched."
            raise CheckpointError(record.name, "must be possible to save on every rank", "; ".join(errors), fix)
        return Commit(**{**vars(record), "ranks": [answer["place"] for answer in answers]})

    def _preflight(self, name: str, request: SaveRequest) -> str | None:
        place = self.filesystem.place_of(self.dirpath, name)
        try:
            if self.rank == 0:  # first, so that nothing is without an owner
                self.filesystem.note(self.dirpath / STAGING / owner_file(name), owner_note())
            self.filesystem.make_directory(place)
            self.filesystem.probe(place / f".probe-{self.rank}")
            needed = sum(tensor.nbytes for state in request.slots.values() for tensor in state.values())
            free = self.filesystem.free_bytes(place)
        except OSError as error:
            return describe(error)
        return f"{needed:,} bytes to write and {free:,} free in {self.dirpath}" if free < needed else None

    def _staged_job(self, attempt: Attempt, name: str, request: SaveRequest) -> Job:
        try:
            return Job(attempt, name, self.slots[name].buffers.stage(request.slots[name]))
        except (
            CheckpointError,
            RuntimeError,
            MemoryError,
        ) as error:  # the other ranks have begun: they must hear of it
            return Job(attempt, name, None, error=describe(error))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> dict[str, float]:
        """Age in seconds of the write under way, by slot."""
        now = time.monotonic()
        jobs = {name: slot.pending for name, slot in self.slots.items()}
        return {name: now - job.attempt.started for name, job in jobs.items() if job is not None}

    @property
    def has_failed(self) -> bool:
        """Whether there is a failure that nobody was told of."""
        with self._lock:
            return bool(self._failures)

    def outcomes(self) -> list[Outcome]:
        """What ended since the last call."""
        with self._lock:
            found, self._outcomes = self._outcomes, []
        return found

    def raise_failure(self) -> None:
        """Raise what failed since the last call, once.

        Raises:
            CheckpointError: the reasons, of all ranks.
        """
        with self._lock:
            failures, self._failures = self._failures, {}
        if failures:
            fix = "Earlier checkpoints are untouched; free space or repair the store, and resume from the last one."
            got = "; ".join(failures.values())
            raise CheckpointError(", ".join(failures), "must be written completely", got, fix)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way; False, and a failure, if that takes longer than ``seconds``."""
        deadline = time.monotonic() + (self.settings.timeout.total_seconds() if seconds is None else seconds)
        for slot in self.slots.values():
            if not slot.wait(max(0.0, deadline - time.monotonic())):
                slot.give_up(f"rank {self.rank}: the {slot.name} were not written before the end of the run")
        return not self.has_failed

    def agree_on(self, flags: Iterable[bool]) -> list[bool]:
        """Which of these flags any rank has set: one small reduction on the host."""
        values = torch.tensor([bool(flag) for flag in flags], dtype=torch.int32)
        if self._control is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return [bool(value) for value in values]

    def _finished(self, job: Job) -> None:
        """On a slot's thread."""
        record, error = job.attempt.record, job.attempt.error
        with self._lock:
            self._open_jobs[record.name] -= 1
            ended = self._open_jobs[record.name] <= 0
            if error and record.name not in self._told:
                self._told.add(record.name)
                self._failures[record.name] = error
            path = job.attempt.final if job.committed else None
            slot = OPTIMIZER if job.name == OPTIMIZER else WEIGHTS
            self._outcomes.append(Outcome(slot, path, record.step, job.seconds, job.size))
        if error and ended:
            self._discard(record.name)
        if job.committed and self.rank == 0:
            self._prune()

    def _prune(self) -> None:
        with self._deleting:
            try:
                scores = read_scores(self.dirpath)
                prune(self.filesystem, self.dirpath, self.settings.retention, scores, self.run, self.protected)
            except (OSError, CheckpointError):
                return  # what could not be removed is tried again after the next commit

    def _discard(self, name: str) -> None:
        if self.rank == 0:
            self.filesystem.discard(self.dirpath, name)

    # -- groups --------------------------------------------------------------------------------------------------------

    def _broken(self) -> list[str]:
        return [name for name, slot in self.slots.items() if slot.broken]

    def _renew(self, names: set[str]) -> None:
        """Replace the groups that are unusable on any rank, on every rank in the same order."""
        for name, slot in self.slots.items():
            if name in names:
                slot.group, slot.broken = self._new_group(self.settings.timeout), False

    def _new_group(self, timeout: timedelta) -> dist.ProcessGroup | None:
        return new_host_group(timeout=timeout) if self.world_size > 1 else None
