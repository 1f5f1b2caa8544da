"""Folders of checkpoints: paths of this machine, and addresses of stores elsewhere (``s3://bucket/run``), read alike.

An :class:`Address` has the few methods of ``pathlib.Path`` that reading a checkpoint needs, over fsspec, which comes
with Lightning. Three things are its own. No listing is taken from a cache, since other processes write. An error of
the store's library, whatever its class, becomes an ``OSError`` with a text, so that "gone" and "no answer" stay apart:
fsspec's own ``exists`` takes both for "gone". And a part of a file is read as a part.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from lightning_longctx.errors import ConfigurationError

__all__ = [
    "Address",
    "Folder",
    "PathLike",
    "as_folder",
    "file_sizes",
    "folder_of_run",
    "is_address",
    "names_in",
    "os_errors",
    "range_reader",
]

_LOCAL = ("file://", "local://")
_MANGLED = re.compile(r"[a-z0-9]{2,}:/")


class Address:
    """A file or folder of a store that fsspec knows.

    Args:
        text: such as ``s3://bucket/run``.

    Attributes:
        path: the same as the file system of the store calls it.
    """

    def __init__(self, text: str) -> None:
        self._text = text.rstrip("/")
        self.path: str = _file_system(self._text)[1]

    @property
    def system(self) -> Any:
        """The file system, which has forgotten what it knew of this place. Asked for anew: none survives a fork."""
        found = _file_system(self._text)[0]
        found.invalidate_cache(self.path)
        return found

    @property
    def name(self) -> str:
        """The last part."""
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """All but the last part."""
        return Address(self._text.rpartition("/")[0])

    def with_name(self, name: str) -> Address:
        """A neighbour."""
        return self.parent / name

    def resolve(self) -> Address:
        """Itself: there are no links."""
        return self

    def is_file(self) -> bool:
        """Whether there is such a file; an OSError if the store does not say."""
        return self._kind() == "file"

    def exists(self) -> bool:
        """Whether there is such a file, or one below; an OSError if the store does not say."""
        return bool(self._kind())

    def _kind(self) -> str:
        try:
            with os_errors(self):
                return str(self.system.info(self.path)["type"])
        except FileNotFoundError:
            return ""

    def names(self) -> list[str]:
        """What is directly below; nothing if there is no such folder."""
        try:
            with os_errors(self):
                listed = self.system.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({entry.rstrip("/").rpartition("/")[2] for entry in listed})

    def sizes(self) -> dict[str, int]:
        """Bytes of all files below, by their path from here: one question, where there may be thousands of files."""
        try:
            with os_errors(self):
                listed = self.system.find(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {name.removeprefix(f"{self.path}/"): int(facts["size"]) for name, facts in listed.items()}

    def size(self) -> int:
        """Bytes of this file."""
        with os_errors(self):
            return int(self.system.info(self.path)["size"])

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """What the file holds, or a part of it: one request, and no more bytes than asked for."""
        with os_errors(self):
            return bytes(self.system.cat_file(self.path, start=start, end=end))

    def read_text(self) -> str:
        """What the file holds, as UTF-8."""
        return self.read_bytes().decode()

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self._text}/{name}")

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Address({self._text!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Address):
            return NotImplemented
        return self.path == other.path and bool(_file_system(self._text)[0] == _file_system(other._text)[0])

    def __hash__(self) -> int:
        return hash(self.path)


#: Where checkpoints are.
Folder = Path | Address
#: What people give for one.
PathLike = str | os.PathLike[str] | Address


def is_address(path: object) -> bool:
    """Whether what a user wrote is of a store elsewhere, and no path of this machine."""
    return "://" in str(path) and not str(path).startswith(_LOCAL)


def as_folder(path: PathLike, field: str = "path") -> Folder:
    """What a user wrote, as a path of this machine or an address.

    Args:
        path: a path, or an address. ``file://`` is this machine.
        field: the setting, for errors.

    Raises:
        ConfigurationError: no path, or an address that no installed package can open, or that names no folder.
    """
    text = str(path)
    if isinstance(path, Path) and _MANGLED.match(text):
        fix = f"Give it as text: `{text.replace(':/', '://', 1)}`."
        raise ConfigurationError(field, "must not be an address as a `Path`, which drops a slash", repr(path), fix)
    if isinstance(path, (Path, Address)):
        return path
    if not text or not (isinstance(path, (str, os.PathLike)) or is_address(path)):
        fix = "Give its path or address, or leave it out."
        raise ConfigurationError(field, "must be a folder", repr(path), fix)
    if not is_address(text):
        return Path(next((text.removeprefix(prefix) for prefix in _LOCAL if text.startswith(prefix)), text))
    if not text.partition("://")[2].strip("/"):
        raise ConfigurationError(field, "must name a folder of the store", text, "Add one, such as `bucket/run`.")
    if getattr(path, "storage_options", None):
        fix = "Put them into the environment or into fsspec's configuration: `ckpt_path` and the tools know no more."
        raise ConfigurationError(field, "must be an address without settings of its own", repr(path), fix)
    try:
        with os_errors(text):
            address = Address(text)
    except ImportError as error:
        raise ConfigurationError(field, "needs a package for such addresses", text, f"{error}.") from None
    except (OSError, ValueError) as error:
        fix = "Check the address, and the credentials in the environment."
        got = f"{text}: {getattr(error, 'strerror', None) or error}"
        raise ConfigurationError(field, "must be an address that fsspec can open", got, fix) from None
    return address


def folder_of_run(dirpath: PathLike | None, default_root_dir: PathLike | None = None) -> Folder:
    """The folder of a run's checkpoints: what was given, or ``checkpoints`` where the run's files go by default.

    Raises:
        ConfigurationError: a folder that cannot be used.
    """
    if dirpath is None:
        return as_folder(default_root_dir or ".", "trainer.default_root_dir") / "checkpoints"
    folder = as_folder(dirpath, "callbacks.AsyncDCPCheckpoint.dirpath")
    return folder.expanduser() if isinstance(folder, Path) else folder


def names_in(folder: Folder) -> list[str]:
    """Names directly below a folder; none if it does not exist."""
    if isinstance(folder, Address):
        return folder.names()
    return os.listdir(folder) if folder.is_dir() else []


def file_sizes(folder: Folder, names: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    """Each of these files with its size in bytes, None for one that is not there.

    Args:
        folder: where they are.
        names: their paths from there.

    Raises:
        OSError: a store does not say.
    """
    listed = folder.sizes() if isinstance(folder, Address) else {}
    for name in names:
        if name in listed:
            yield name, listed[name]
            continue
        try:  # what a listing lacks may be there: some of fsspec's file systems skip what they could not list
            file = folder / name
            yield name, file.size() if isinstance(file, Address) else file.stat().st_size
        except FileNotFoundError:
            yield name, None
        except OSError:
            if isinstance(folder, Address):
                raise
            yield name, None


@contextmanager
def range_reader(file: Folder) -> Iterator[Callable[[int, int], bytes]]:
    """A function that returns the bytes of a file from one position to another."""
    if isinstance(file, Address):
        yield file.read_bytes
        return
    with file.open("rb") as opened:

        def read(start: int, end: int) -> bytes:
            opened.seek(start)
            return opened.read(end - start)

        yield read


@contextmanager
def os_errors(place: object) -> Iterator[None]:
    """Raise what a store's library raises as an ``OSError`` that says what, and where."""
    try:
        yield
    except ImportError:
        raise
    except OSError as error:
        if error.strerror and error.errno:
            raise
        number = next((code for kind, code in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        text = str(error) if " " in str(error) else os.strerror(number)  # some give the path alone
        raise OSError(number, text, str(place)) from error
    except Exception as error:  # botocore's, aiohttp's, Google's: they have no common class
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(place)) from error


_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
}


def _file_system(text: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return cast("tuple[Any, str]", url_to_fs(text))
