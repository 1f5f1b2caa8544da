"""Starting a process by fork while the parent has garbage that must not be collected in the child.

What an earlier fit left, in cycles that nobody has collected yet, may own threads and sockets: the process groups of
its ranks. A fork copies the objects and not the threads, so a child whose garbage collector comes to them dies with a
segmentation fault.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["garbage_left_alone"]

# Python 3.12 begins with 375 objects of its own among the frozen ones; after the imports that we need, anybody's call
# of `gc.freeze` has hundreds of thousands.
_OF_PYTHON = 10_000


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Keep the collector of a process that is forked inside from all objects that are there already.

    Memory that parent and child share stays shared, too: a collection writes to each object that it looks at.
    """
    is_frozen = gc.get_freeze_count() > _OF_PYTHON  # by somebody's own call, which must not be undone
    gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
