"""Every operation on files that changes a checkpoint, behind one small object.

One door makes two things possible: a test can kill the process before each single operation, and another store can be
put behind the same code (:class:`~lightning_longctx.checkpoint.object_store.ObjectStore`). Each method that changes
something calls :meth:`FileSystem.before` first.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from typing_extensions import Buffer

from lightning_longctx.checkpoint.address import Folder
from lightning_longctx.checkpoint.layout import COMMIT, STAGING, TEMPORARY, TOMBSTONE, owner_file

__all__ = ["ChecksumStream", "FileSystem"]

# Large enough that the calls cost nothing, small enough that another thread gets the interpreter in between.
_PIECE = 16 * 2**20
_SMALL = 64 * 2**10


class FileSystem:
    """Files on a store with atomic rename: local disks, NFS, Lustre."""

    def before(self, operation: str, path: Folder) -> None:
        """Called before each operation that changes something. Does nothing here; tests kill or fail in it."""

    # -- files ---------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Folder) -> None:
        """Create a directory and its parents; one that exists is fine."""
        self.before("mkdir", path)
        _local(path).mkdir(parents=True, exist_ok=True)

    def create(self, path: Folder) -> ChecksumStream:
        """Open a file for writing. It must not exist: a checkpoint never writes twice into one place."""
        self.before("create", path)
        return ChecksumStream(self, path)

    def write(self, path: Folder, content: bytes) -> tuple[int, int]:
        """Create a file with ``content``, durably; return its size and CRC32."""
        with self.create(path) as stream:
            stream.write(content)
        return stream.size, stream.crc32

    def replace(self, path: Folder, content: bytes) -> tuple[int, int]:
        """As :meth:`write`, but atomically: readers see nothing, the old content, or all of the new one."""
        target = _local(path)
        temporary = target.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{threading.get_ident()}")
        if temporary.exists():  # of a process with the same number that died
            self.before("unlink", temporary)
            temporary.unlink()
        facts = self.write(temporary, content)
        self.before("replace", path)
        temporary.replace(target)
        self.sync_directory(target.parent)
        return facts

    def note(self, path: Folder, content: bytes = b"") -> None:
        """Create a small file that need not survive a loss of power."""
        self.before("create", path)
        with _local(path).open("xb") as file:
            file.write(content)

    def probe(self, path: Folder) -> None:
        """Create a file and remove it: a folder may be there and yet be read-only here."""
        self.note(path)
        self.remove_file(path)

    def sync_directory(self, path: Folder) -> None:
        """Make the names in a directory durable."""
        self.before("fsync", path)
        descriptor = os.open(_local(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Folder, target: Folder) -> None:
        """Rename a file or directory; the target must not exist."""
        self.before("rename", source)
        _local(source).rename(_local(target))

    def remove_tree(self, path: Folder) -> None:
        """Remove a directory with its content, or a file; what is gone already is fine."""
        self.before("remove", path)
        if (place := _local(path)).is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)

    def remove_file(self, path: Folder) -> None:
        """Remove a file; one that is gone already is fine."""
        self.before("remove", path)
        _local(path).unlink(missing_ok=True)

    def free_bytes(self, path: Folder) -> int:
        """Bytes that may still be written where ``path`` is."""
        facts = os.statvfs(_local(path))
        return facts.f_bavail * facts.f_frsize

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def prepare(self, root: Folder) -> None:
        """Make the folder of checkpoints, before the first step."""
        self.make_directory(root / STAGING)

    def place_of(self, root: Folder, name: str) -> Folder:
        """Where the files of a checkpoint are written."""
        return root / STAGING / name

    def publish(self, root: Folder, name: str, record: bytes, decide: Callable[[], None]) -> None:
        """Make what was written a checkpoint, at once and durably.

        Args:
            root: the folder of checkpoints.
            name: of the checkpoint; everything but its record is in its place.
            record: its record.
            decide: called last before there is no way back; raises if it must not be.
        """
        staging = self.place_of(root, name)
        self.replace(staging / COMMIT, record)
        decide()
        self.rename(staging, root / name)
        self.sync_directory(root)
        self.sync_directory(root / STAGING)
        self.remove_file(root / STAGING / owner_file(name))

    def discard(self, root: Folder, name: str) -> None:
        """Remove what a failed save has left. What cannot be removed now waits for the next start."""
        staging, tombstone = self.place_of(root, name), root / STAGING / f"{TOMBSTONE}{name}"
        with suppress(OSError):
            self.rename(staging, tombstone)
            self.remove_tree(tombstone)
            self.remove_file(root / STAGING / owner_file(name))

    def remove_checkpoint(self, root: Folder, name: str) -> None:
        """Remove a checkpoint: for readers at once, its bytes after that."""
        tombstone = root / STAGING / f"{TOMBSTONE}{name}"
        self.make_directory(root / STAGING)
        self.rename(root / name, tombstone)
        self.sync_directory(root)
        self.remove_tree(tombstone)

    def sweep(self, root: Folder, name: str) -> None:
        """Remove what a dead owner left outside of the staging folder, before its note goes: nothing here."""

    # -- what a stream does --------------------------------------------------------------------------------------------

    def open_new(self, path: Folder) -> IO[bytes]:
        """A file to write to, which must not exist."""
        return _local(path).open("xb", buffering=0)

    def append(self, file: IO[bytes], piece: memoryview, path: Folder) -> None:
        """Write all of a piece."""
        done = 0
        while done < len(piece):  # an unbuffered file may take less than it was given
            done += file.write(piece[done:]) or 0

    def finish(self, file: IO[bytes], path: Folder) -> None:
        """Make a file that was written durable."""
        self.before("fsync", path)
        os.fsync(file.fileno())
        file.close()

    def abandon(self, file: IO[bytes]) -> None:
        """Close a file that is not complete."""
        file.close()


class ChecksumStream:
    """A file that is being written: counts bytes, takes their CRC32, and is durable once closed without an error.

    Attributes:
        size: bytes so far.
        crc32: of all bytes, once closed.
    """

    def __init__(self, filesystem: FileSystem, path: Folder) -> None:
        self._filesystem = filesystem
        self._path = path
        self._file = filesystem.open_new(path)
        self._error: BaseException | None = None
        self._held = bytearray()  # torch writes a tensor in about thirty pieces of a few bytes
        self.size = 0
        self.crc32 = 0

    def write(self, data: Buffer) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if len(view) < _SMALL:
            self._held += view
        if len(view) >= _SMALL or len(self._held) >= _PIECE:
            self._release()
        if len(view) >= _SMALL:
            for start in range(0, len(view), _PIECE):
                self._write_piece(view[start : start + _PIECE])
        self.size += len(view)
        return len(view)

    def _release(self) -> None:
        held, self._held = self._held, bytearray()
        if held:
            self._write_piece(memoryview(held))

    def _write_piece(self, piece: memoryview) -> None:
        try:
            self._filesystem.before("write", self._path)
            self._filesystem.append(self._file, piece, self._path)
        except BaseException as error:
            self._error = error
            raise
        self.crc32 = zlib.crc32(piece, self.crc32)

    def tell(self) -> int:
        """Position, in bytes."""
        return self.size

    def flush(self) -> None:
        """Small pieces are held back until the end."""

    def __enter__(self) -> ChecksumStream:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        done = False
        try:
            if self._error is not None:  # torch's writer turns it into one about positions in a file
                raise self._error
            if kind is None:
                self._release()
                self._filesystem.finish(self._file, self._path)
                done = True
        finally:
            if not done:
                self._filesystem.abandon(self._file)


def _local(path: Folder) -> Path:
    assert isinstance(path, Path), "an address needs an ObjectStore"
    return path
