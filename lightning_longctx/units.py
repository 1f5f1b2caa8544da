"""Numbers as people write them: tokens in settings (``4096``, ``512K``, ``1M``, ``2e10``), counts in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from lightning_longctx.errors import ConfigurationError

__all__ = ["GIB", "MIB", "TokenCount", "TokenCountLike", "check_whole", "counted", "parse_token_count"]

if TYPE_CHECKING:
    TokenCount: TypeAlias = int
    TokenCountLike: TypeAlias = int | float | str
else:

    class TokenCount(int):
        """A number of tokens in a signature: ``max_seq_len: TokenCount``.

        The command line and YAML accept such a parameter in the forms of :func:`parse_token_count` and echo it as the
        integer. It is an alias of int for type checkers, for what is stored; ``TokenCountLike`` is the same for what
        a caller in Python may pass, strings too. A class of its own at run time, so that the command line can tell it
        from other integers.
        """

    TokenCountLike = TokenCount


#: Bytes.
MIB = 2**20
GIB = 2**30

# Binary, because context lengths are powers of two: 512K is 524,288 tokens.
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


def parse_token_count(value: int | float | str, field: str = "tokens") -> int:
    """Turn a number of tokens into an int.

    Args:
        value: an int, a float without a fraction, or a string such as ``"512K"``, ``"1M"``, ``"1_048_576"``,
            ``"2e10"``.
        field: the name to use in the error.

    Returns:
        The number of tokens, positive.

    Raises:
        ConfigurationError: not a number of tokens, with a fraction, or not positive.

    Example:
        >>> parse_token_count("512K"), parse_token_count("1M"), parse_token_count("2e10")
        (524288, 1048576, 20000000000)
    """
    fix = "Write 4096, 1_048_576, 512K, 1M (binary) or 2e10."
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigurationError(field, "must be a number of tokens", repr(value), fix)
    text = str(value).strip().replace("_", "")
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) if not text.isdigit() else int(text)
        count = int(number * factor)
    except (ValueError, OverflowError):
        raise ConfigurationError(field, "must be a number of tokens", repr(value), fix) from None
    if count != number * factor or count < 1:
        raise ConfigurationError(field, "must be a whole positive number of tokens", repr(value), fix)
    return count


def check_whole(field: str, value: object, least: int) -> None:
    """Make sure that a setting is a whole number of at least ``least``.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(field, "must be a whole number", repr(value), f"Give {least} or more.")
    if value < least:
        raise ConfigurationError(field, f"must be at least {least}", value, f"Give {least} or more.")


def counted(number: float, noun: str) -> str:
    """A number with its noun, as every message that counts something has it.

    Args:
        number: how many; rounded to a whole number.
        noun: one of them, with a regular plural; words may stand before it.

    Example:
        >>> counted(1, "document"), counted(2300, "training document"), counted(2, "micro-batch")
        ('1 document', '2,300 training documents', '2 micro-batches')
    """
    written = f"{number:,.0f}"
    ending = "" if written == "1" else "es" if noun.endswith(("s", "x", "tch")) else "s"
    return f"{written} {noun}{ending}"
