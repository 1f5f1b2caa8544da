"""A clock beside the run that notices when nothing happens any more.

It waits in a thread of its own, since the thread that hangs cannot tell. A process that holds the interpreter lock for
good (a stuck extension that never releases it) stops this clock as well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

__all__ = ["Watchdog"]

# Before the limit counts: the first steps compile, allocate and wait for the first rows.
_BEATS_TO_ARM = 5
_BEATS_KEPT = 100
# The limit is looked at this many times while it runs; at least once in `_LONGEST_POLL` seconds.
_POLLS = 20
_LONGEST_POLL = 5.0


class Watchdog:
    """Calls ``alarm`` once, if ``beat`` was not called for ``factor`` times its median interval.

    Args:
        factor: of the median interval between beats.
        least_s: seconds below which it never alarms.
        alarm: called in the watchdog's thread with the seconds since the last sign of life, and the median.

    Example:
        >>> import threading
        >>> alarmed = threading.Event()
        >>> dog = Watchdog(factor=10.0, least_s=0.05, alarm=lambda waited, usual: alarmed.set())
        >>> dog.start()
        >>> for _ in range(6):
        ...     dog.beat()
        >>> alarmed.wait(timeout=10.0)
        True
        >>> dog.stop()
    """

    def __init__(self, factor: float, least_s: float, alarm: Callable[[float, float], None]) -> None:
        self._factor = factor
        self._least = least_s
        self._alarm = alarm
        self._intervals: deque[float] = deque(maxlen=_BEATS_KEPT)
        self._mark = time.monotonic()
        self._stopped: threading.Event | None = None  # made for each thread: an event cannot go to another process
        self._thread: threading.Thread | None = None

    @property
    def limit(self) -> float | None:
        """Seconds without a sign of life that count as a hang; None while too few beats were seen."""
        intervals = list(self._intervals)  # a copy: the deque changes in another thread
        if len(intervals) < _BEATS_TO_ARM:
            return None
        return max(self._least, self._factor * median(intervals))

    def start(self) -> None:
        """Begin to watch, from no beats on."""
        self._intervals.clear()
        self._mark = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._stopped,), name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Note a step: a sign of life, and an interval."""
        now = time.monotonic()
        self._intervals.append(now - self._mark)
        self._mark = now

    def touch(self) -> None:
        """Note a sign of life that is no step."""
        self._mark = time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        if self._stopped is not None:
            self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = self._stopped = None

    def _watch(self, stopped: threading.Event) -> None:
        while not stopped.wait(min(_LONGEST_POLL, (self.limit or self._least) / _POLLS)):
            limit, waited = self.limit, time.monotonic() - self._mark
            if limit is not None and waited > limit:
                self._alarm(waited, median(list(self._intervals)))
                return
