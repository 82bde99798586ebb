"""Remembers which ids the model generated for a text, so that the next turn reuses them.

Encoding an answer again may give other ids than those the model chose, and a kept state is found
by ids alone. One memory serves all requests of a model; it may be used from any thread.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock


class Provenance:
    """Least recently used map from the exact text of an answer to its ids.

    Bounded twice: beyond ``max_entries`` answers or ``max_chars`` characters of text in all, the
    answer that was used longest ago is forgotten; a text longer than that is not remembered.
    """

    def __init__(self, max_entries: int = 256, max_chars: int = 4_000_000) -> None:
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._chars = 0
        self._lock = Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def remember(self, text: str, ids: tuple[int, ...]) -> None:
        """Keep an answer; ids without the end token. Nothing is kept for an empty one."""
        if not text or not ids or len(text) > self._max_chars:
            return
        with self._lock:
            if self._entries.pop(text, None) is None:
                self._chars += len(text)
            self._entries[text] = ids
            while len(self._entries) > self._max_entries or self._chars > self._max_chars:
                forgotten, _ = self._entries.popitem(last=False)
                self._chars -= len(forgotten)

    def recall(self, text: str) -> tuple[int, ...] | None:
        """The ids last generated for exactly this text."""
        with self._lock:
            if text not in self._entries:
                return None
            self._entries.move_to_end(text)
            return self._entries[text]
