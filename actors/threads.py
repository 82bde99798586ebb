"""OS threads that have run MLX and must therefore never end.

When such a thread ends, MLX's thread-local state is destroyed after Python has already called the
thread joined; if the interpreter is on its way out by then, the process aborts. So a device's
thread is parked instead, and lent to the next device of the process. Any thread may call here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_idle: list[DeviceThread] = []
_guard = threading.Lock()


class DeviceThread:
    """A daemon thread that runs one job after another, for as long as the process lives."""

    def __init__(self) -> None:
        # One job at a time is ever queued: only an idle thread is lent.
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="gpu", daemon=True).start()

    def _serve(self) -> None:
        while True:
            job, done = self._jobs.get()
            try:
                job()
            finally:
                with _guard:
                    _idle.append(self)
                done.set()

    def give(self, job: Callable[[], None]) -> threading.Event:
        """Run ``job``; the event is set at its end."""
        done = threading.Event()
        self._jobs.put((job, done))
        return done


def run_on_device_thread(job: Callable[[], None]) -> threading.Event:
    """Run ``job`` on a thread of its own; the event is set at its end."""
    with _guard:
        thread = _idle.pop() if _idle else None
    return (thread or DeviceThread()).give(job)
