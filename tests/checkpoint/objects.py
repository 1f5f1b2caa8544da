"""``objects://<folder>``: a store as S3 is one, kept in files of this machine so that processes share it.

There are no directories and no rename. An object appears whole when its upload ends, and not at all if that never
comes. Each request that changes something is told to ``ObjectsFileSystem.before`` first, so a test can kill between any
two of them, also between two parts of an upload and two deletions of one call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PART = 512
_UPLOAD = ".upload-"


class ObjectsFileSystem(AbstractFileSystem):
    """The store."""

    protocol = "objects"
    root_marker = "/"
    cachable = False
    before: Callable[[str, str], None] = staticmethod(lambda operation, path: None)
    reads: list[tuple[str, int]] = []  # name and bytes of each answer

    def _files(self, path: str) -> Iterator[Path]:
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in names if _UPLOAD not in name)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if os.path.isfile(path):
            return {"name": path, "size": os.path.getsize(path), "type": "file"}
        if any(self._files(path)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        below = [file.relative_to(path).parts[0] for file in self._files(path)]
        if not below:
            raise FileNotFoundError(path)
        entries = [self.info(f"{path}/{name}") for name in sorted(set(below))]
        return entries if detail else [entry["name"] for entry in entries]

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, detail: bool = False, **_: Any) -> Any:
        found = {str(file): self.info(str(file)) for file in self._files(self._strip_protocol(path))}
        return found if detail else sorted(found)

    def modified(self, path: str) -> datetime:
        path = self._strip_protocol(path)
        if not os.path.isfile(path):
            raise IsADirectoryError(path)  # as s3fs does
        return datetime.fromtimestamp(os.path.getmtime(path), UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        content = Path(self._strip_protocol(path)).read_bytes()[start:end]
        self.reads.append((os.path.basename(path), len(content)))
        return content

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        self.before("put", path)
        _appear(path, value)

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> AbstractBufferedFile:
        assert mode == "wb"
        settings.pop("block_size", None)
        return _Upload(self, path, mode, block_size=PART, **settings)

    def _rm(self, path: str) -> None:
        self.before("delete", path)
        Path(path).unlink(missing_ok=True)

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:
        assert recursive
        found = self.find(path)
        if not found:
            raise FileNotFoundError(path)
        for file in found:
            self._rm(file)

    def mkdir(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("no directories here")

    makedirs = mv = cp_file = copy = rename = mkdir


class _Upload(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.before("part", self.path)
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.before("complete", self.path)
            _appear(self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        self.fs.before("abort", self.path)


def _appear(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    upload = Path(f"{path}{_UPLOAD}{os.getpid()}")
    upload.write_bytes(content)
    upload.replace(path)


class Killer:
    """Counts requests, and kills the process before one of them."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.count = 0

    def __call__(self, operation: str, path: str) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


@contextmanager
def watched(before: Callable[[str, str], None]) -> Iterator[None]:
    """Tell each change to a function."""
    ObjectsFileSystem.before = staticmethod(before)
    try:
        yield
    finally:
        ObjectsFileSystem.before = staticmethod(lambda operation, path: None)


fsspec.register_implementation("objects", ObjectsFileSystem, clobber=True)
