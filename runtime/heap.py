"""Memory that the C library keeps for later, given back to the system.

Stateless, for any thread; does nothing where the C library is not glibc. That keeps a heap for each
thread, and leaves the end of one alone until it is a threshold long: about 64 MiB once large blocks
were freed. What a thread needed once would stay with the process for good.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_THRESHOLD = 64 << 20
_OWN_PAGES = 32 << 20
"""What glibc's own rule arrives at once large blocks were freed: how long the end of a heap may be,
and how large a block that is mapped by itself. Setting one of them ends the rule for both."""
_LARGE_CHUNK = 100 << 10
"""Large enough for free() to look at the end of the heap, and below the least mmap threshold."""


def cut_heap() -> None:
    """Give back the free end of the calling thread's heap; takes microseconds."""
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_TRIM_THRESHOLD, 0)
        _cut(libc)
        libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)


def trim_heaps() -> None:
    """Give back all free pages of all heaps, but for the ends of other threads' ones.

    What MKL keeps for its threads, some MB each once there were large products, is freed before,
    and with it the ends of their heaps.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_TRIM_THRESHOLD, 0)
        if hasattr(libc, "mkl_free_buffers"):
            libc.mkl_free_buffers()
        _cut(libc)
        libc.malloc_trim(0)
        libc.mallopt(_M_TRIM_THRESHOLD, _THRESHOLD)


def own_pages(nbytes: int) -> memoryview:
    """Bytes on no heap: their memory is the system's again as soon as nobody looks at them.

    Raises MemoryError.
    """
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[:nbytes]


def _cut(libc: ctypes.CDLL) -> None:
    libc.free(ctypes.c_void_p(libc.malloc(_LARGE_CHUNK)))


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "malloc_trim"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)
    return libc
