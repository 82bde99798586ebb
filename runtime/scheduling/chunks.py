"""How many prompt tokens one step may process while rows are waiting for their next token.

Prefill is sized by time, not by count: as many tokens as are expected to take max(200 ms, two
decode steps) at the depth where they stand (``costs``). Where the pass itself takes most of that
time, as many as double it. Runs inside the scheduler's core: it is told durations and reads no
clock.
"""

from __future__ import annotations

from .costs import PrefillCosts

MAX_CHUNK = 2048
MIN_CHUNK = 16
FIRST_CHUNK = 64
STALL_SECONDS = 0.2
PATIENCE = 4
"""This many times the stall while more rows wait for their first token than run."""
FAR = 4
ALONE_SECONDS = 5.0
ALONE_CHUNK = 512
"""What a step may take, and process, where nothing runs but nothing can be taken back either."""
SMOOTHING = 0.3


class ChunkSizer:
    """Learns what prefill and decode cost and answers with a chunk size in tokens."""

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        self._costs = PrefillCosts()
        self._largest = FIRST_CHUNK

    @property
    def chunk(self) -> int:
        """Tokens that one step may prefill at a prompt's beginning while other rows decode."""
        return self.budget(pending=1, running=1)

    def budget(self, *, pending: int, running: int, blocking: bool = False, depth: int = 0) -> int:
        """The same for ``pending`` rows in prefill beside ``running`` rows that decode.

        ``blocking``: a step that was launched holds up whoever comes next, and cannot be cancelled.
        ``depth``: tokens that stand before those of the chunk.
        """
        if not running and not blocking:
            return MAX_CHUNK
        costs, decode = self._costs, self.decode_seconds
        if not running:
            alone = costs.tokens_in(ALONE_SECONDS, depth, decode=decode, wasteful=True)
            return ALONE_CHUNK if alone is None else max(ALONE_CHUNK // 2, _rounded(alone))
        limit = max(STALL_SECONDS, 2 * decode)
        limit *= PATIENCE if pending > running else 1
        tokens = costs.tokens_in(limit, depth, decode=decode)
        if tokens is None:
            return FIRST_CHUNK
        # A line says little about what lies far beyond all that was seen.
        return _rounded(min(tokens, FAR * self._largest))

    def saw(self, *, prefilled: int, decoded: int, seconds: float, pairs: float = 0.0) -> None:
        """Learn from one settled step of ``prefilled`` prompt tokens and ``decoded`` rows.

        ``pairs``: of each prompt token with those before it, summed.
        """
        if seconds <= 0:
            return
        if not prefilled:
            if decoded:
                self.decode_seconds = _smooth(self.decode_seconds, seconds)
            return
        spent = max(seconds - (self.decode_seconds if decoded else 0.0), seconds * 0.1)
        self._costs.saw(tokens=prefilled, pairs=pairs, seconds=spent, decode=self.decode_seconds)
        self._largest = max(self._largest, prefilled)


def _rounded(tokens: float) -> int:
    """Down to a power of two from 256 on (few shapes for a GPU), else to a multiple of 16."""
    if tokens >= MAX_CHUNK:
        return MAX_CHUNK
    if tokens < 2 * MIN_CHUNK:
        return MIN_CHUNK
    if tokens < 256:
        return int(tokens) // MIN_CHUNK * MIN_CHUNK
    return 1 << (int(tokens).bit_length() - 1)


def _smooth(old: float, new: float) -> float:
    return new if not old else old + SMOOTHING * (new - old)
