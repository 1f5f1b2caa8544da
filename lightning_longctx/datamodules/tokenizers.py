"""From text to token ids: bytes, a ``tokenizer.json``, the model's own tokenizer, or any callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_longctx.datamodules.chat import ChatTemplate
from lightning_longctx.datamodules.settings import known_names
from lightning_longctx.errors import ConfigurationError

__all__ = ["BYTES_VOCAB_SIZE", "END_OF_DOCUMENT", "FROM_MODEL", "Tokenize", "bytes_tokenizer", "resolve_tokenizer"]

#: What a tokenizer is here: text to ids, or to a mapping with ``input_ids`` and, optionally, aligned ``labels``.
Tokenize: TypeAlias = Callable[[str], "Sequence[int] | NDArray[Any] | Mapping[str, Any]"]

#: The id that ends a document under ``tokenizer: bytes``; ids 0 to 255 are the bytes themselves.
END_OF_DOCUMENT = 256
BYTES_VOCAB_SIZE = 257

#: ``tokenizer: from_model`` asks the LightningModule's ``load_tokenizer()``.
FROM_MODEL = "from_model"


class BytesTokenizer:
    """UTF-8 bytes and an end-of-document id: needs no file, has no unknown text, and any text can be read back.

    An empty text gives no token at all, so that empty documents are dropped and counted.

    Example:
        >>> bytes_tokenizer("hi").tolist()
        [104, 105, 256]
    """

    vocab_size = BYTES_VOCAB_SIZE

    def __call__(self, text: str) -> NDArray[np.int32]:
        """Encode one text."""
        data = text.encode("utf-8", errors="surrogatepass")
        if not data:
            return np.empty(0, np.int32)
        ids = np.empty(len(data) + 1, np.int32)
        ids[:-1] = np.frombuffer(data, np.uint8)
        ids[-1] = END_OF_DOCUMENT
        return ids

    def join(self, prompt: str, response: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids of a prompt, and of a response, which ends the document; none if both are empty."""
        if not prompt and not response:
            return self(""), self("")
        return self(prompt)[:-1], self(response) if response else np.array([END_OF_DOCUMENT], np.int32)


bytes_tokenizer = BytesTokenizer()


class FileTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library. Adds the special tokens that the file itself asks for."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            fix = "pip install 'lightning-longctx[hf]'."
            raise ConfigurationError("data.tokenizer", "needs the tokenizers package", path, fix) from None
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing more specific
            fix = "Give the `tokenizer.json` that was saved with the model."
            raise ConfigurationError("data.tokenizer", "must be a tokenizer file", f"{path}: {error}", fix) from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def __call__(self, text: str) -> list[int]:
        """Encode one text; an empty text gives no token."""
        return list(self._tokenizer.encode(text).ids) if text else []

    def join(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt and of a response; special tokens only before the one and behind the other."""
        return _joined(
            self, lambda text: list(self._tokenizer.encode(text, add_special_tokens=False).ids), prompt, response
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included: for people who look at what is trained on."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class ModelTokenizer:
    """A Hugging Face tokenizer. Ends each document with its end-of-sequence token, if it has one and did not add it.

    Attributes:
        chat: see :meth:`ChatTemplate.encode`; None if the tokenizer has no chat template, or is not a fast one. A
            conversation ends as the template ends it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        able = getattr(tokenizer, "chat_template", None) and getattr(tokenizer, "is_fast", False)
        self._template = ChatTemplate(tokenizer) if able else None
        self.chat = None if self._template is None else self._template.encode

    @property
    def vocab_size(self) -> int:
        """Number of ids, added ones included."""
        return len(self._tokenizer)

    def check_chat(self) -> None:
        """Check that the chat template can be read.

        Raises:
            ConfigurationError: it cannot.
        """
        if self._template is not None:
            self._template.check()

    def __call__(self, text: str) -> list[int]:
        """Encode one text; an empty text gives no token."""
        if not text:
            return []
        # verbose=False: a document beyond the tokenizer's model_max_length is the normal case here, not worth a
        # warning.
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def join(self, prompt: str, response: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt and of a response; special tokens only before the one and behind the other."""

        def plain(text: str) -> list[int]:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        return _joined(self, plain, prompt, response)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included: for people who look at what is trained on."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _joined(
    whole: Callable[[str], list[int]], plain: Callable[[str], list[int]], prompt: str, response: str
) -> tuple[list[int], list[int]]:
    """Two texts that are tokenized apart, as they are when the model answers: none of its tokens spans both."""
    parts = [(whole(text), plain(text)) for text in (prompt, response) if text]
    if not parts:
        return [], []
    before, _ = _added(*parts[0])
    _, behind = _added(*parts[-1])
    return [*before, *(plain(prompt) if prompt else [])], [*(plain(response) if response else []), *behind]


def _added(whole: list[int], plain: list[int]) -> tuple[list[int], list[int]]:
    """The special tokens before and behind a text: how ``whole`` differs from ``plain``."""
    for start in range(len(whole) - len(plain) + 1):
        stop = start + len(plain)
        if whole[start:stop] == plain:
            return whole[:start], whole[stop:]
    return [], []


def resolve_tokenizer(tokenizer: str | Tokenize) -> tuple[Tokenize | None, int | None]:
    """Turn the setting into a callable and its vocabulary size.

    Args:
        tokenizer: ``bytes``, ``from_model``, the path of a ``tokenizer.json``, the import path of a callable, or a
            callable.

    Returns:
        The callable and the number of ids. ``(None, None)`` for ``from_model``, known once there is a model; the number
        is None for a callable that has no ``vocab_size``.

    Raises:
        ConfigurationError: an unknown name, a missing file, or not a callable.
    """
    if callable(tokenizer):
        return tokenizer, getattr(tokenizer, "vocab_size", None)
    if not isinstance(tokenizer, str):
        _refuse(repr(tokenizer))
    if tokenizer == "bytes":
        return bytes_tokenizer, BYTES_VOCAB_SIZE
    if tokenizer == FROM_MODEL:
        return None, None
    if tokenizer.endswith(".json"):
        path = Path(tokenizer).expanduser()
        if not path.is_file():
            raise ConfigurationError("data.tokenizer", "must be a file that exists", repr(tokenizer), "Check the path.")
        loaded = FileTokenizer(str(path))
        return loaded, loaded.vocab_size
    return _imported(tokenizer)


def _imported(name: str) -> tuple[Tokenize, int | None]:
    module, _, attribute = name.rpartition(".")
    try:
        target: Any = getattr(import_module(module), attribute) if module else None
    except (ImportError, AttributeError):
        target = None
    if not callable(target):
        _refuse(repr(name), known_names(name, ["bytes", FROM_MODEL]))
    return target, getattr(target, "vocab_size", None)


def _refuse(got: str, hint: str = "") -> NoReturn:
    fix = "Give bytes, from_model, the path of a tokenizer.json, or a callable (in YAML: its import path)."
    raise ConfigurationError("data.tokenizer", "must be a known tokenizer", got, f"{hint} {fix}".strip())
