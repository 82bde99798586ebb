"""How many prompt tokens one step may process while rows are waiting for their next token.

Prefill is sized by time, not by count: the largest power of two whose measured cost stays under
max(200 ms, two decode steps). It is told durations and reads no clock.
"""

from __future__ import annotations

MAX_CHUNK = 2048
MIN_CHUNK = 16
FIRST_CHUNK = 64
STALL_SECONDS = 0.2
SMOOTHING = 0.3


class ChunkSizer:
    """Learns what prefill and decode cost and answers with a chunk size in tokens."""

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        self._token_seconds = 0.0
        self._chunk = FIRST_CHUNK

    @property
    def chunk(self) -> int:
        """Tokens that one step may prefill while other rows decode."""
        return self._chunk

    def saw(self, *, prefilled: int, decoded: int, seconds: float) -> None:
        """Learn from one settled step of ``prefilled`` prompt tokens and ``decoded`` rows."""
        if seconds <= 0:
            return
        if not prefilled:
            if decoded:
                self.decode_seconds = _smooth(self.decode_seconds, seconds)
                self._resize()
            return
        spent = max(seconds - (self.decode_seconds if decoded else 0.0), seconds * 0.1)
        # A handful of tokens costs about as much as a full pass over the weights: per-token cost
        # learnt from it would shrink the chunk for no reason.
        if prefilled >= self._chunk // 2:
            self._token_seconds = _smooth(self._token_seconds, spent / prefilled)
            self._resize()

    def _resize(self) -> None:
        if not self._token_seconds:
            return
        limit = max(STALL_SECONDS, 2 * self.decode_seconds)
        if self._token_seconds * self._chunk > limit and self._chunk > MIN_CHUNK:
            self._chunk //= 2
        elif self._token_seconds * self._chunk * 2 <= limit and self._chunk < MAX_CHUNK:
            self._chunk *= 2


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
