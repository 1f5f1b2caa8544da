"""The last lines of a fit: what each part has to say of it, together, once, on the first rank.

A part (callback, data module, strategy) with something to say has a method ``closing_lines() -> list[str]``. It is
asked on the first rank alone, after the last step or after Ctrl-C, so it makes no collective and waits for no device.
Nobody needs to know who else speaks. The lines go where Lightning's own messages go, and to no logger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["Closing", "closing_of"]

# What ends a run on purpose. After anything else the error is what people must see.
_STOPS = (KeyboardInterrupt, SIGTERMException)


class Closing:
    """The closing lines of one trainer. A callback opens it when training starts, and it is told once.

    Attributes:
        is_open: whether it will be told; until then a part that would print something at the end can leave it to this.
    """

    def __init__(self) -> None:
        self.is_open = False

    def begin(self) -> None:
        """Expect the lines of a fit, in ``on_train_start``."""
        self.is_open = True

    def tell(self, trainer: Any, first: Any, exception: BaseException | None = None) -> None:
        """Print what every part has to say, in ``teardown`` and ``on_exception``; later calls do nothing.

        Args:
            trainer: its fit is over.
            first: the part that is asked first; then data module, strategy, and callbacks in their order.
            exception: what ended the fit. Unless that was Ctrl-C or a signal to stop, nothing is printed.
        """
        was_open, self.is_open = self.is_open, False
        if not was_open or not trainer.is_global_zero or not isinstance(exception, (*_STOPS, type(None))):
            return
        rest = [getattr(trainer, "datamodule", None), trainer.strategy, *trainer.callbacks]
        lines = list(_lines([first, *(part for part in rest if part is not first)]))
        if lines:
            rank_zero_info("\n".join(["", *lines]))


def closing_of(trainer: Any) -> Closing:
    """Return the closing of a trainer."""
    return _closings.setdefault(trainer, Closing())


def _lines(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        tell = getattr(part, "closing_lines", None)
        if callable(tell):
            yield from tell()
        elif path := _best_checkpoint(part):
            yield f"Checkpoint: {path}"


def _best_checkpoint(part: Any) -> str:
    """That of Lightning's ``ModelCheckpoint``, which knows nothing of closing lines."""
    return str(getattr(part, "best_model_path", None) or "")


# Beside the trainer, because it is not ours to write on.
_closings: WeakKeyDictionary[Any, Closing] = WeakKeyDictionary()
