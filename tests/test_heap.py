"""Memory that was needed once does not stay with the process."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_troupe.actors.figures import resident_bytes
from mlx_troupe.runtime.heap import cut_heap, own_pages, trim_heaps

SIZE = 24 << 20


def on_a_thread(work: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def use_and_free() -> None:
    """One block that no heap maps by itself, from the thread's heap and back."""
    np.ones(SIZE, np.uint8)


@pytest.mark.parametrize("give_back", [cut_heap, trim_heaps])
def test_the_end_of_a_threads_heap_goes_back_to_the_system(give_back: Callable[[], None]) -> None:
    """A block as large as a state is freed, and the thread lives on."""

    def work() -> int:
        give_back()
        before = resident_bytes()
        use_and_free()
        kept = resident_bytes() - before
        # Elsewhere heaps are not glibc's, and nobody says what is resident.
        assert kept > SIZE // 2 or sys.platform != "linux", "there was nothing to give back"
        give_back()
        return resident_bytes() - before

    assert on_a_thread(work) < SIZE // 8


def test_pages_of_their_own_go_with_the_last_who_looks_at_them() -> None:
    """They are bytes like others until then, of any number."""
    before = resident_bytes()
    pages = own_pages(SIZE)
    np.frombuffer(pages, np.uint8)[:] = 7
    part = pages[:5].toreadonly()
    assert (len(pages), bytes(part)) == (SIZE, b"\x07" * 5)
    assert bytes(own_pages(0)) == b""
    with pytest.raises(MemoryError):
        own_pages(1 << 60)
    del pages
    assert bytes(part) == b"\x07" * 5
    del part
    assert resident_bytes() - before < SIZE // 8


def test_a_kernel_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its refusal of the advice is no lack of memory, and no fault of a file."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)
    pages = own_pages(5)
    pages[:] = b"bytes"
    assert bytes(pages) == b"bytes"
