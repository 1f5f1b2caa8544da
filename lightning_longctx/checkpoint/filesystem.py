"""Every operation on files that a checkpoint makes, behind one small object.

One door makes two things possible: a test can kill the process before each single operation, and another store can be
put behind the same code. Each method that changes something calls :meth:`FileSystem.before` first.
"""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from pathlib import Path

from typing_extensions import Buffer

__all__ = ["ChecksumStream", "FileSystem"]

# Large enough that the calls cost nothing, small enough that another thread gets the interpreter in between.
_PIECE = 16 * 2**20
_SMALL = 64 * 2**10


class FileSystem:
    """Files on a store with atomic rename: local disks, NFS, Lustre."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that changes something. Does nothing here; tests kill or fail in it."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents; one that exists is fine."""
        self.before("mkdir", path)
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> ChecksumStream:
        """Open a file for writing. It must not exist: a checkpoint never writes twice into one place."""
        self.before("create", path)
        return ChecksumStream(self, path)

    def write(self, path: Path, content: bytes) -> tuple[int, int]:
        """Create a file with ``content``, durably; return its size and CRC32."""
        with self.create(path) as stream:
            stream.write(content)
        return stream.size, stream.crc32

    def replace(self, path: Path, content: bytes) -> tuple[int, int]:
        """As :meth:`write`, but atomically: readers see nothing, the old content, or all of the new one."""
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
        if temporary.exists():  # of a process with the same number that died
            self.before("unlink", temporary)
            temporary.unlink()
        facts = self.write(temporary, content)
        self.before("replace", path)
        temporary.replace(path)
        self.sync_directory(path.parent)
        return facts

    def note(self, path: Path, content: bytes = b"") -> None:
        """Create a small file that need not survive a loss of power."""
        self.before("create", path)
        with path.open("xb") as file:
            file.write(content)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        self.before("fsync", path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory; the target must not exist."""
        self.before("rename", source)
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with its content, or a file; what is gone already is fine."""
        self.before("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written where ``path`` is."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize


class ChecksumStream:
    """A file that is being written: counts bytes, takes their CRC32, and is durable once closed without an error.

    Attributes:
        size: bytes so far.
        crc32: of all bytes, once closed.
    """

    def __init__(self, filesystem: FileSystem, path: Path) -> None:
        self._filesystem = filesystem
        self._path = path
        self._file = path.open("xb", buffering=0)
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
            done = 0
            while done < len(piece):  # an unbuffered file may take less than it was given
                done += self._file.write(piece[done:]) or 0
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
        try:
            if self._error is not None:  # torch's writer turns it into one about positions in a file
                raise self._error
            if kind is None:
                self._release()
                self._filesystem.before("fsync", self._path)
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
