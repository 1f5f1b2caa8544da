"""Packers of other systems, written anew from their public behaviour, and what a rank sees of any packer.

Each peer is a generator: it takes the next lengths with ``read`` and yields rows as lists of document numbers. Systems
are named where a packer of this behaviour is found; none of their code is used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from time import perf_counter

from lightning_longctx.datamodules import PackingReport

__all__ = ["PEERS", "best_fit_chunks", "first_fit_bins", "knapsack_buffer", "next_fit", "run_peer"]

Read = Callable[[], int]
Packer = Callable[[Read, int], Iterator[list[int]]]


def next_fit(read: Read, window: int) -> Iterator[list[int]]:
    """Fill one row in order; the first document that does not fit closes it and opens the next (torchtune)."""
    row: list[int] = []
    room, number = window, 0
    while True:
        length = read()
        if length > room:
            yield row
            row, room = [], window
        row.append(number)
        room -= length
        number += 1


def first_fit_bins(read: Read, window: int, bins: int = 8) -> Iterator[list[int]]:
    """Put each document into the first open row with room; if none has any, give them all (Grain, torchtitan)."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    number = 0
    while True:
        length = read()
        place = next((index for index, room in enumerate(rooms) if length <= room), len(rooms))
        if place == bins:
            yield from rows
            rows, rooms, place = [], [], 0
        if place == len(rows):
            rows.append([])
            rooms.append(window)
        rows[place].append(number)
        rooms[place] -= length
        number += 1


def best_fit_chunks(read: Read, window: int, chunk: int = 1000) -> Iterator[list[int]]:
    """Best fit, longest first, over chunks of documents; every row of a chunk is given (TRL's ``bfd``)."""
    start = 0
    while True:
        lengths = [read() for _ in range(chunk)]
        for row in _best_fit(lengths, window):
            yield [start + index for index in row]
        start += chunk


def best_fit_carry(read: Read, window: int, batch: int = 128) -> Iterator[list[int]]:
    """Best fit, longest first, over batches; the last row is kept open for the next one (ms-swift, streaming)."""
    numbers: list[int] = []
    lengths: list[int] = []
    read_so_far = 0
    while True:
        numbers += range(read_so_far, read_so_far + batch)
        lengths += [read() for _ in range(batch)]
        read_so_far += batch
        rows = _best_fit(lengths, window)
        for row in rows[:-1]:
            yield [numbers[index] for index in row]
        numbers, lengths = [numbers[index] for index in rows[-1]], [lengths[index] for index in rows[-1]]


def knapsack_buffer(read: Read, window: int, buffer: int = 200) -> Iterator[list[int]]:
    """Fill a buffer, pack all of it, each row by the longest document that still fits, and give every row (Energon)."""
    start = 0
    while True:
        waiting = sorted((read(), start + index) for index in range(buffer))  # shortest first
        while waiting:
            row: list[int] = []
            room = window
            while (place := bisect_right(waiting, (room, start + buffer))) > 0:
                length, number = waiting.pop(place - 1)
                row.append(number)
                room -= length
            yield row
        start += buffer


def _best_fit(lengths: list[int], window: int) -> list[list[int]]:
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(rooms, (lengths[index], -1))
        if place == len(rooms):
            room, row = window, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(place)
        rows[row].append(index)
        insort(rooms, (room - lengths[index], row))
    return rows


#: By name, in the order of the tables.
PEERS: dict[str, Packer] = {
    "next fit": next_fit,
    "first fit, 8 bins": first_fit_bins,
    "knapsack, buffer of 200": knapsack_buffer,
    "best fit, batches of 128": best_fit_carry,
    "best fit, chunks of 1000": best_fit_chunks,
}


def run_peer(packer: Packer, lengths: Iterable[int], window: int, micro_batches: int) -> PackingReport:
    """Run a packer on lengths, and measure it as ``simulate_packing`` measures a policy.

    Args:
        packer: of this module, or alike.
        lengths: tokens of each document; must not end.
        window: the budget of a row.
        micro_batches: rows to make.
    """
    reader = _Reader(lengths)
    selected: list[list[int]] = []
    fills: list[float] = []
    first_documents = peak = max_wait = 0
    start = perf_counter()
    for numbers in islice(packer(reader.read, window), micro_batches):
        first_documents = first_documents or len(reader.lengths)
        used = sum(reader.lengths[number] for number in numbers)
        peak = max(peak, reader.waiting)
        max_wait = max(max_wait, *(reader.rows - reader.arrivals[number] for number in numbers))
        reader.waiting -= used
        reader.rows += 1
        fills.append(used / window)
        selected.append(numbers)
    steady = fills[1:] or fills
    return PackingReport(
        first_documents=first_documents,
        first_fill=fills[0],
        steady_fill=sum(steady) / len(steady),
        fills=fills,
        max_wait=max_wait,
        peak_pool_tokens=peak,
        selected=selected,
        documents=len(reader.lengths),
        seconds=perf_counter() - start,
    )


class _Reader:
    """Hands out lengths, and notes before which row each was read."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._source = iter(lengths)
        self.lengths: list[int] = []
        self.arrivals: list[int] = []
        self.rows = 0  # given so far
        self.waiting = 0  # tokens read and not given

    def read(self) -> int:
        length = next(self._source)
        self.lengths.append(length)
        self.arrivals.append(self.rows)
        self.waiting += length
        return length
