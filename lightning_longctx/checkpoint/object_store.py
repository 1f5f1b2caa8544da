"""Checkpoints on a store without atomic rename: S3, Google Cloud Storage, Azure, whatever fsspec can write to.

Nothing moves there. Files have their final names from the start, each object appears whole or not at all, and the
record comes last: what has no ``COMMIT.json`` is no checkpoint, whatever else is there. So it goes first when a
checkpoint is removed. While objects of a name may be there that belong to no checkpoint, a note in ``.staging/`` says
who answers for them; a later start finishes what a dead process began to remove, or never committed.

The store must show what was written to whoever reads next, as those three do.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from lightning_longctx.checkpoint.address import Address, Folder, os_errors
from lightning_longctx.checkpoint.filesystem import FileSystem
from lightning_longctx.checkpoint.layout import COMMIT, STAGING, owner_file
from lightning_longctx.checkpoint.notes import owner_note

__all__ = ["ObjectStore", "filesystem_of"]


class ObjectStore(FileSystem):
    """Objects below an address. The commit is the record's upload, and no rename."""

    # -- files ---------------------------------------------------------------------------------------------------------

    def make_directory(self, path: Folder) -> None:
        """Nothing: names of objects have slashes, and there are no directories."""

    def write(self, path: Folder, content: bytes) -> tuple[int, int]:
        """Upload a small object, at once."""
        self.before("write", path)
        self._put(path, content)
        return len(content), zlib.crc32(content)

    def replace(self, path: Folder, content: bytes) -> tuple[int, int]:
        """The same: an upload replaces what was there, at once."""
        self.before("replace", path)
        self._put(path, content)
        return len(content), zlib.crc32(content)

    def note(self, path: Folder, content: bytes = b"") -> None:
        """Upload a note."""
        self.before("create", path)
        self._put(path, content)

    def sync_directory(self, path: Folder) -> None:
        """Nothing: an upload that was answered is durable."""

    def remove_tree(self, path: Folder) -> None:
        """Remove what is below an address, its record first: from then on the rest is no checkpoint."""
        self.remove_file(path / COMMIT)
        self.before("remove", path)
        address = _remote(path)
        with suppress(FileNotFoundError), os_errors(address):
            address.system.rm(address.path, recursive=True)

    def remove_file(self, path: Folder) -> None:
        """Remove one object; one that is gone already is fine."""
        self.before("remove", path)
        address = _remote(path)
        with suppress(FileNotFoundError), os_errors(address):
            address.system.rm_file(address.path)

    def free_bytes(self, path: Folder) -> int:
        """No limit that anybody could ask for."""
        return sys.maxsize

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def prepare(self, root: Folder) -> None:
        """There is nothing to make; whether one may write is found out now, and not at the first save."""
        self.probe(root / STAGING / ".probe")

    def place_of(self, root: Folder, name: str) -> Folder:
        """Where they stay."""
        return root / name

    def publish(self, root: Folder, name: str, record: bytes, decide: Callable[[], None]) -> None:
        """Upload the record: with it, it is a checkpoint."""
        decide()
        self.replace(root / name / COMMIT, record)
        self.remove_file(root / STAGING / owner_file(name))

    def discard(self, root: Folder, name: str) -> None:
        """Remove what a failed save has left.

        The note stays until the next start, which looks again: a rank that was given up may still be uploading.
        """
        with suppress(OSError):
            self.sweep(root, name)

    def remove_checkpoint(self, root: Folder, name: str) -> None:
        """Remove a checkpoint. If this process dies after the record is gone, its note has the rest removed."""
        note = root / STAGING / owner_file(name)
        self.note(note, owner_note())
        self.remove_tree(root / name)
        self.remove_file(note)

    def sweep(self, root: Folder, name: str) -> None:
        """Remove objects that belong to no checkpoint: where there is a record there is one, whatever a note says."""
        if not _remote(root / name / COMMIT).is_file():
            self.remove_tree(root / name)

    # -- what a stream does --------------------------------------------------------------------------------------------

    def open_new(self, path: Folder) -> IO[bytes]:
        """An upload in parts; nothing is to be seen of it before it ends."""
        address = _remote(path)
        with os_errors(address):
            return cast(IO[bytes], address.system.open(address.path, "wb"))

    def append(self, file: IO[bytes], piece: memoryview, path: Folder) -> None:
        """Add to an upload."""
        with os_errors(path):
            file.write(piece)

    def finish(self, file: IO[bytes], path: Folder) -> None:
        """End an upload: the object appears."""
        self.before("commit", path)
        with os_errors(path):
            file.close()

    def abandon(self, file: IO[bytes]) -> None:
        """Give up an upload, so that the store does not keep its parts."""
        from fsspec.spec import AbstractBufferedFile

        with suppress(OSError), os_errors("an upload"):
            if isinstance(file, AbstractBufferedFile):
                unfinished: Any = file
                unfinished.closed = True  # first: closing, which the interpreter also does, would complete it
                unfinished.discard()
            else:
                file.close()

    def _put(self, path: Folder, content: bytes) -> None:
        address = _remote(path)
        with os_errors(address):
            address.system.pipe_file(address.path, content)


def filesystem_of(folder: Folder) -> FileSystem:
    """What changes a folder of checkpoints goes through."""
    return FileSystem() if isinstance(folder, Path) else ObjectStore()


def _remote(path: Folder) -> Address:
    assert isinstance(path, Address), "a path needs a FileSystem"
    return path
