"""What is wrong with one record, said where its place is not known yet."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from lightning_longctx.errors import DataError, FieldError

__all__ = ["BadRecord", "NamedRecord", "checked_text", "text_of"]


class BadRecord(Exception):  # noqa: N818 - it becomes a DataError where source and place are known
    """A record that cannot become a document.

    Args:
        rule: what must hold, as in :class:`FieldError`.
        got: what it got; `` in <place>`` is added.
        fix: what to do.
    """

    def __init__(self, rule: str, got: str, fix: str) -> None:
        super().__init__(rule, got, fix)
        self.rule, self.got, self.fix = rule, got, fix

    def at(self, field: str, place: str) -> DataError:
        """The same as an error that names source, file and line."""
        return DataError(field, self.rule, f"{self.got} {place}", self.fix)


# What names its place by itself, or is no error.
_OURS = (BadRecord, FieldError, StopIteration)


class NamedRecord:
    """Around what somebody's tokenizer, dataset or iterable does for a record: names it in an error of any class.

    Args:
        describe: tells the place; called where there is such an error only, since that may read the file.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        """Nothing is needed before."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, _OURS):
            error.add_note(f"Raised for {self._describe()}.")


def checked_text(text: str) -> str:
    """The text itself, if it can be written as UTF-8.

    JSON can hold half of a surrogate pair (an escaped U+D800), which UTF-8 has no bytes for: some tokenizers fail on
    it, and others make tokens of it that no text can be read back from.

    Raises:
        BadRecord: it has a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        got = f"the lone surrogate {text[error.start]!r} at character {error.start} in"
        raise BadRecord("must have text that is valid Unicode", got, "Repair it where it was cut.") from None
    return text


def text_of(error: BaseException) -> str:
    """Class and message of an error of somebody's code, and the record that it was raised for."""
    return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
