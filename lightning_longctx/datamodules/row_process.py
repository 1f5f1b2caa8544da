"""Rows made by one background process, for runs whose own process has no time to spare for Python.

The child holds the same :class:`LocalRows` that the other runtime calls in a thread. It is forked where that is safe
for its content (Linux): sources and tokenizers need not be pickled then, and are not copied, as with the workers of a
data loader. It never touches a device or a process group.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from socket import SHUT_RDWR, socket
from threading import Thread
from time import sleep
from traceback import format_exception
from typing import Any

import torch

from lightning_longctx.datamodules.bad_record import text_of
from lightning_longctx.datamodules.forking import garbage_left_alone
from lightning_longctx.datamodules.helper_process import obey_the_parent_only
from lightning_longctx.datamodules.packing import flatten_row, unflatten_row
from lightning_longctx.datamodules.policies import BufferPolicy
from lightning_longctx.datamodules.row_state import Reweight
from lightning_longctx.datamodules.rows import RowSettings, RowState
from lightning_longctx.datamodules.runtime import GivenRow, LocalRows, Plan
from lightning_longctx.datamodules.sent_documents import ReceivedDocuments, SentDocuments
from lightning_longctx.errors import DataError, FieldError

__all__ = ["RowProcess"]

_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
# How long the child may take to end its own workers before it is killed (seconds).
_GRACE = 5.0
# How often each side looks whether the other one lives (seconds).
_LOOK = 1.0


class RowProcess:
    """Makes rows in a child process, as :class:`LocalRows` does in this one.

    Args:
        settings: what to read and how to pack.
        policy: chooses.
        state: where to start.
        start_method: of the child. Default: ``fork`` on Linux, ``spawn`` elsewhere, which needs sources and a tokenizer
            that can be pickled.
    """

    def __init__(
        self, settings: RowSettings, policy: BufferPolicy, state: RowState, start_method: str = _START_METHOD
    ) -> None:
        self._arguments = settings, policy, state
        self._start_method = start_method
        self._documents = ReceivedDocuments()
        self._connection: Connection | None = None
        self._process: BaseProcess | None = None
        self._end: Callable[[], object] | None = None

    def open(self) -> None:
        """Start the child."""
        context = get_context(self._start_method)
        self._connection, theirs = context.Pipe()
        # Not a daemon, which may not have workers of its own; so its end is ours to see to, also at exit.
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, *self._arguments), name="longctx-rows", daemon=False
        )
        with garbage_left_alone():
            self._process.start()
        theirs.close()
        self._end = Finalize(self, _end, (self._process, self._connection), exitpriority=100)

    def plan(self) -> Plan:
        """Have rows planned.

        Raises:
            DataError: what the child failed with, or that it died.
        """
        offers, counters, state = self._ask(None)
        return Plan(offers, counters, None if state is None else self._documents.restore(state))

    def give(self, index: int) -> GivenRow:
        """Have a planned row packed."""
        tokens, documents, divisor, state = self._ask(index)
        payload = torch.frombuffer(bytearray(self._receive(Connection.recv_bytes)), dtype=torch.int32)
        return GivenRow(unflatten_row(payload, tokens, documents, divisor), self._documents.restore(state))

    def reweight(self, row: int, weights: Mapping[str, float]) -> None:
        """Have the child mix by other weights from the documents on that are read for row number ``row``."""
        self._ask(Reweight(row, dict(weights)))

    def stop(self) -> None:
        """End the child: a call under way fails at once. Nothing is lost, since every state is here already."""
        if self._process is not None:
            _end_process(self._process)
        if self._connection is not None and sys.platform != "win32":
            # A read that the child left half answered ends, whoever else inherited the other end of the pipe.
            with socket(fileno=os.dup(self._connection.fileno())) as pipe:
                pipe.shutdown(SHUT_RDWR)

    def close(self) -> None:
        """See that the child is gone."""
        if self._end is not None:
            self._end()
            self._process = self._connection = self._end = None

    def _ask(self, request: int | Reweight | None) -> Any:
        answer = self._receive(Connection.recv, request)
        if isinstance(answer, FieldError):
            raise answer
        return answer

    def _receive(self, read: Callable[[Connection], Any], *requests: int | Reweight | None) -> Any:
        """Send requests, and read what comes as soon as it is there and as long as the child lives."""
        assert self._connection is not None
        assert self._process is not None
        try:
            for request in requests:
                self._connection.send(request)
            while not self._connection.poll(_LOOK):
                if not self._process.is_alive() and not self._connection.poll():
                    raise EOFError
            return read(self._connection)
        except (EOFError, OSError):  # the pipe is broken or shut
            self._process.join(_GRACE)
            got = f"exit code {self._process.exitcode}"
            fix = "-9 is most often the system's for want of memory. See what it printed, or use `runtime: main`."
            raise DataError("data.loading.runtime", "worker must live as long as the run", got, fix) from None


def _end(process: BaseProcess, connection: Connection) -> None:
    _end_process(process)
    connection.close()


def _end_process(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
        process.join(_GRACE)
    if process.is_alive():  # inside a call that does not listen
        process.kill()
    process.join()


# -- the child ---------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, settings: RowSettings, policy: BufferPolicy, state: RowState) -> None:
    """Answer requests: None for a plan, an index for a row of it, weights to mix by."""
    obey_the_parent_only()
    torch.set_num_threads(1)  # as a data loader's workers: a fork does not copy the threads of OpenMP
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    maker, sent = LocalRows(settings, policy, state), SentDocuments(settings.reader)
    try:
        while True:
            _answer(connection, _made(maker, connection.recv()), sent)
    except (EOFError, OSError):
        return  # the parent closed its end
    finally:
        maker.close()


def _made(maker: LocalRows, request: int | Reweight | None) -> Plan | GivenRow | FieldError | None:
    try:
        maker.open()  # here, so that the parent is told why it fails; nothing from the second time on
        if isinstance(request, Reweight):
            return maker.reweight(*request)
        return maker.plan() if request is None else maker.give(request)
    except Exception as error:  # the parent raises it
        return _told(error)


def _answer(connection: Connection, made: Plan | GivenRow | FieldError | None, sent: SentDocuments) -> None:
    if made is None or isinstance(made, FieldError):
        connection.send(made)
        return
    if isinstance(made, Plan):
        state = None if made.state is None else sent.strip(made.state)
        connection.send((made.offers, made.counters, state))
        return
    row = made.row
    tokens, documents = row["input_ids"].numel(), len(row["document_keys"])
    connection.send((tokens, documents, row["loss_divisor"], sent.strip(made.state)))
    connection.send_bytes(flatten_row(row).numpy().data)


def _told(error: Exception) -> FieldError:
    """An error of ours as it is; any other as its text, since it may not survive the way to the parent."""
    if isinstance(error, FieldError):
        return error
    text = "".join(format_exception(error))
    return DataError("data", "must be readable", text_of(error), f"In the row process:\n{text}")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        sleep(_LOOK)
    os._exit(1)
