"""Streams of document lengths for the packing benchmark and the tests of policies.

Lengths in tokens, clipped to the window. They imitate kinds of corpora and are not measurements of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["STREAMS", "oracle_documents"]

_BLOCK = 4096


def _clipped(draw: Callable[[np.random.Generator], NDArray[np.float64]]) -> Callable[[int, int], Iterator[int]]:
    def lengths(seed: int, window: int) -> Iterator[int]:
        generator = np.random.default_rng(seed)
        while True:
            yield from np.clip(draw(generator), 1, window).astype(int).tolist()

    return lengths


def _lognormal(generator: np.random.Generator, median: float, sigma: float) -> NDArray[np.float64]:
    return median * np.exp(sigma * generator.standard_normal(_BLOCK))


def _wide(generator: np.random.Generator) -> NDArray[np.float64]:
    return _lognormal(generator, 20_000, 1.5)


def _mid_size(generator: np.random.Generator) -> NDArray[np.float64]:
    return np.maximum(_lognormal(generator, 50_000, 0.7), 4096)


def _chats_and_books(generator: np.random.Generator) -> NDArray[np.float64]:
    short = generator.random(_BLOCK) < 0.8
    return np.where(short, generator.uniform(1024, 4096, _BLOCK), generator.uniform(100_000, 900_000, _BLOCK))


def _web_and_code(generator: np.random.Generator) -> NDArray[np.float64]:
    kind = generator.random(_BLOCK)
    tail = 20_000 * (1 - generator.random(_BLOCK)) ** (-1 / 1.1)  # Pareto, exponent 1.1
    web, code = _lognormal(generator, 1500, 1.0), _lognormal(generator, 3000, 1.2)
    return np.where(kind < 0.6, web, np.where(kind < 0.95, code, tail))


def _repository(generator: np.random.Generator) -> NDArray[np.float64]:
    """Source files of a repository and, one in ten, a whole directory of them."""
    files = _lognormal(generator, 1800, 1.4)
    folders = np.array([files[generator.integers(0, _BLOCK, generator.integers(2, 60))].sum() for _ in range(_BLOCK)])
    return np.where(generator.random(_BLOCK) < 0.1, folders, files)


#: ``STREAMS[name](seed, window)`` gives lengths without end.
STREAMS: dict[str, Callable[[int, int], Iterator[int]]] = {
    "mid-size": _clipped(_mid_size),
    "wide": _clipped(_wide),
    "chats and books": _clipped(_chats_and_books),
    "web and code": _clipped(_web_and_code),
    "repository": _clipped(_repository),
}


def oracle_documents(lengths: Iterable[int], window: int, fill: float) -> int:
    """Fewest documents of a stream whose best subset fills the window so far: nobody can start earlier."""
    reachable, mask = 1, (1 << (window + 1)) - 1
    for count, (length, total) in enumerate(zip(*_twice(lengths), strict=False), start=1):
        reachable |= reachable << length & mask
        if total >= fill * window and (reachable.bit_length() - 1) >= fill * window:
            return count
    raise ValueError("the stream ended before the window was full")


def _twice(lengths: Iterable[int]) -> tuple[Iterable[int], Iterable[int]]:
    first = list(_take(lengths, 2000))
    return first, accumulate(first)


def _take(lengths: Iterable[int], count: int) -> Iterator[int]:
    for _, length in zip(range(count), lengths, strict=False):
        yield length
