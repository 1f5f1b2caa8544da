"""From what a user writes as ``path`` to files, and from a file to its bytes, here or elsewhere, compressed or not.

Files elsewhere (``s3://``, ``hf://``, ``memory://``) are opened through fsspec, each time anew: its connections do not
survive a fork, and a new one is cheap beside a document.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from os.path import isfile  # Path's method raises for a name that is too long for any file
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from lightning_longctx.errors import ConfigurationError

__all__ = ["READ_ERRORS", "compression_of", "find_files", "is_remote", "open_bytes", "suffix_of"]

#: What reading a file may raise: gone, forbidden, a broken connection, or compressed data that is cut off or broken.
READ_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)

_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = set("*?[")


def is_remote(path: str) -> bool:
    """Whether a path is an address such as ``s3://bucket/file``."""
    return "://" in path


def suffix_of(path: str) -> str:
    """The suffix that tells what a file holds: that before ``.gz`` or ``.zst``."""
    name = PurePosixPath(path)
    return (name.with_suffix("") if compression_of(path) else name).suffix.lower()


def compression_of(path: str) -> str | None:
    """``gzip``, ``zstd``, or None."""
    return _COMPRESSED.get(PurePosixPath(path).suffix.lower())


def find_files(patterns: str | Sequence[str], field: str) -> list[str]:
    """All files of a path, glob, address, or list of them: the patterns in their order, each one's files sorted.

    A file that two patterns match is taken once; one that is named twice is refused.

    Args:
        patterns: what the user wrote.
        field: the setting, for errors.

    Returns:
        Paths; files that are elsewhere as addresses. Empty for a single pattern that matches nothing here.

    Raises:
        ConfigurationError: an address that cannot be listed, a pattern of a list that matches nothing, or a file that
            is named twice.
    """
    written = [patterns] if isinstance(patterns, str) else list(patterns)
    found: dict[str, None] = {}
    named: set[str] = set()
    missing: list[str] = []
    for pattern in written:
        pattern = pattern.removeprefix("file://")
        files = _remote_files(pattern, field) if is_remote(pattern) else _local_files(pattern)
        if not files and (len(written) > 1 or is_remote(pattern)):
            missing.append(repr(pattern))
        if not _MAGIC & set(pattern):
            if named.intersection(files):
                fix = "It would be read once: raise the source's `weight` to see it more often, or leave one out."
                raise ConfigurationError(field, "must name a file once", f"{pattern!r} twice", fix)
            named.update(files)
        found.update(dict.fromkeys(files))
    if missing:
        raise ConfigurationError(field, "must match at least one file", ", ".join(missing), "Check the path.")
    return list(found)


def _local_files(pattern: str) -> list[str]:
    expanded = str(Path(pattern).expanduser())
    if isfile(expanded):  # also where the name itself has brackets
        return [expanded]
    return sorted(path for path in glob(expanded, recursive=True) if isfile(path))


def _remote_files(pattern: str, field: str) -> list[str]:
    try:
        system, path = _file_system(pattern)
        if not _MAGIC & set(path):
            return [system.unstrip_protocol(path)] if system.isfile(path) else []
        found = system.glob(path, detail=True)  # with what they are: no further question for each file
        return sorted(system.unstrip_protocol(name) for name, facts in found.items() if facts["type"] == "file")
    except ImportError as error:
        raise ConfigurationError(field, "needs a package for such addresses", pattern, f"{error}.") from None
    except (OSError, ValueError) as error:
        fix = "Check the address, and the credentials in the environment."
        raise ConfigurationError(field, "must be an address that can be read", f"{pattern}: {error}", fix) from None


def _file_system(path: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return cast("tuple[Any, str]", url_to_fs(path))


@contextmanager
def open_bytes(path: str, decompress: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes.

    Args:
        path: of a file here, or an address.
        decompress: whether ``.gz`` and ``.zst`` are opened as what they hold.

    Raises:
        OSError: it cannot be opened.
    """
    if is_remote(path):
        system, inner = _file_system(path)
        raw = system.open(inner, "rb")
    else:
        raw = open(path, "rb")  # noqa: SIM115 - closed below
    kind = compression_of(path) if decompress else None
    with raw:
        if kind is None:
            yield raw
        elif kind == "gzip":
            with gzip.open(raw, "rb") as plain:
                yield cast("IO[bytes]", plain)
        else:
            with _zstd(raw) as plain:
                yield plain


def _zstd(raw: IO[bytes]) -> IO[bytes]:
    """Zstandard through pyarrow's codec: it is there with Hugging Face datasets, and Python has none before 3.14."""
    import pyarrow

    return cast("IO[bytes]", pyarrow.CompressedInputStream(raw, "zstd"))
