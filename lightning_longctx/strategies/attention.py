"""Attention cores: causal attention inside each document of a packed row, behind one small interface.

A core sees whole documents of some heads; what is exchanged between ranks around it is no concern of its own. Which
core runs depends on what is at hand: a variable-length kernel on a GPU, exact attention document by document elsewhere.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_longctx.batch import PackedSequence
from lightning_longctx.errors import ConfigurationError
from lightning_longctx.strategies.document_attention import DocumentAttention
from lightning_longctx.strategies.flex_attention import FlexAttention
from lightning_longctx.strategies.varlen_attention import FlashAttention, TorchVarlenAttention

__all__ = ["AUTO", "CORES", "AttentionCore", "choose_core"]


class AttentionCore(Protocol):
    """Causal attention per document. Cores keep no state: facts about a row stay with its ``PackedSequence``."""

    def refuses(self, query: Tensor, value: Tensor, window: int | None) -> str | None:
        """Say why these tensors cannot be computed here, or None if they can."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence, scale: float, window: int | None
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[T, H, D]``, the whole row for some heads.
            key: ``[T, Hkv, D]``; ``Hkv`` divides ``H``: query head ``h`` uses key/value head ``h // (H / Hkv)``.
            value: ``[T, Hkv, Dv]``.
            packed: the documents of the row.
            scale: of the scores.
            window: a token sees itself and the ``window - 1`` tokens before it in its document; None for all of them.

        Returns:
            ``[T, H, Dv]``.
        """


#: The name that stands for the first core that does not refuse.
AUTO = "auto"

#: Cores by name, the fastest first. `auto` takes them in this order, but never `flex`: it compiles for minutes.
CORES: dict[str, AttentionCore] = {
    "flash_attn": FlashAttention(),
    "varlen": TorchVarlenAttention(),
    "flex": FlexAttention(),
    "documents": DocumentAttention(),
}


def choose_core(name: str, query: Tensor, value: Tensor, window: int | None) -> AttentionCore:
    """Return the core called ``name``, or for ``auto`` the fastest that can compute these tensors.

    Raises:
        ConfigurationError: an unknown name, or a core that was asked for and refuses.
    """
    if name == AUTO:
        able = (core for key, core in CORES.items() if key != "flex" and core.refuses(query, value, window) is None)
        return next(able)  # `documents` refuses nothing
    if name not in CORES:
        known = ", ".join([AUTO, *CORES])
        raise ConfigurationError("attention core", f"must be one of {known}", repr(name), "Correct the name.")
    reason = CORES[name].refuses(query, value, window)
    if reason is not None:
        got = f"{str(query.dtype).removeprefix('torch.')} tensors on {query.device.type}: {reason}"
        fix = "Take `auto`, or `documents`, which runs everywhere."
        raise ConfigurationError(f"attention core `{name}`", "must be able to run here", got, fix)
    return CORES[name]
