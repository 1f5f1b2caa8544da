"""Text files, one document each: here or elsewhere, compressed or not, read by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_longctx.datamodules.paths import READ_ERRORS, open_bytes
from lightning_longctx.datamodules.source_settings import SourceSettings
from lightning_longctx.datamodules.sources import FileSource, IndexableSource
from lightning_longctx.errors import DataError

__all__ = ["TextFilesSource"]

_FIX = "Repair it, or set `loading.on_bad_record: skip`."


class TextFilesSource(FileSource, IndexableSource):
    """UTF-8 text files, one document each.

    Args:
        name: of the source.
        settings: of the source.
        paths: the files, in order.
        field: the setting it stands in, for errors.
        errors: what to do with bytes that are not UTF-8, as in ``open``. Default ``strict``: a bad record.
    """

    def __init__(
        self, name: str, settings: SourceSettings, paths: Sequence[str], field: str = "", errors: str = "strict"
    ) -> None:
        super().__init__(name, settings, paths, field)
        self._errors = errors

    def __len__(self) -> int:
        return len(self.paths)

    def describe(self, number: int, record: Mapping[str, Any] | None = None) -> str:
        """The file's path."""
        return self.paths[number]

    def read(self, number: int) -> Mapping[str, Any]:
        """Read a file as ``{text_field: its text}``."""
        path = self.paths[number]
        try:
            with open_bytes(path) as file:
                data = file.read()
            text = data.decode("utf-8-sig", errors=self._errors)
        except UnicodeDecodeError as error:
            got = f"{path}: byte {error.start} cannot be decoded"
            raise DataError(self.field, "must be UTF-8 text", got, _FIX) from None
        except READ_ERRORS as error:
            raise DataError(self.field, "must be readable", f"{path}: {error}", _FIX) from None
        # As Python reads text: line ends of other systems are one character.
        return {self.text_field: text.replace("\r\n", "\n").replace("\r", "\n")}
