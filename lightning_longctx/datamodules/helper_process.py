"""Processes that read for a run go on when the run is told to stop: it needs rows for its last step, and then saves.

Ctrl-C, torchrun, SLURM and container managers signal every process of a run, not only those that train. What trains
answers at the end of its step; a reading process that obeyed by itself would turn that into a crash without a save.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import active_children
from threading import Thread

__all__ = ["obey_the_parent_only"]


def obey_the_parent_only() -> None:
    """Ignore what asks a run to stop, and leave at the one SIGTERM that counts: that of the parent process.

    Call it in the main thread of the process, before others are started. On Linux a thread waits for the signal, so
    that a call that takes long in the main thread is no obstacle. Elsewhere Python programs are not told who sent a
    signal, and any SIGTERM counts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # clusters announce a time limit by them
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in the threads to come, too
        Thread(target=_listen, args=(os.getppid(),), name="longctx-signals", daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, lambda *_: _leave())


def _listen(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    _leave()


def _leave() -> None:
    """End this process and those that it started, from any thread."""
    for child in active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
