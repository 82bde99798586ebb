"""Work that nobody waits for, on threads that take only what processors have left.

Where the system gives each thread a priority of its own (Linux), a niced thread costs rows that
compute next to nothing even on a machine without a core to spare. Elsewhere it is a thread like any
other. Called on trio's worker threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

NICE = 10
"""About a tenth of a processor that others want all of; all of one that nobody wants."""


def on_spare_time(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done on such a thread while the caller waits.

    The thread is new each time, since a priority that was given up is not had again.
    """
    done: Future[T] = Future()

    def run() -> None:
        _give_way()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="spare time", daemon=True).start()
    return done.result()


def _give_way() -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # forbidden here: then as elsewhere
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
