"""How many prompt tokens one step may process while rows are waiting for their next token.

Prefill is sized by time, not by count: as many tokens as are expected to take max(200 ms, two
decode steps). A pass over the weights costs something however few tokens it processes, so the
expectation is a line, fitted to what steps took; a proportion would shrink without end. Where the
pass itself takes most of that time, as many as double it. Runs
inside the scheduler's core: it is told durations and reads no clock.
"""

from __future__ import annotations

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
MEMORY = 0.9
"""What an observation is worth after the next one."""


class ChunkSizer:
    """Learns what prefill and decode cost and answers with a chunk size in tokens."""

    def __init__(self) -> None:
        self.decode_seconds = 0.0
        # Sums of weight, tokens, seconds, tokens², tokens·seconds of decaying observations.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._largest = FIRST_CHUNK

    @property
    def chunk(self) -> int:
        """Tokens that one step may prefill while other rows decode."""
        return self.budget(pending=1, running=1)

    def budget(self, *, pending: int, running: int, blocking: bool = False) -> int:
        """The same for ``pending`` rows in prefill beside ``running`` rows that decode.

        ``blocking``: a step that was launched holds up whoever comes next, and cannot be cancelled.
        """
        if not running:
            return self._alone() if blocking else MAX_CHUNK
        limit = max(STALL_SECONDS, 2 * self.decode_seconds)
        limit *= PATIENCE if pending > running else 1
        fixed, each = self._line()
        if each <= 0:
            return FIRST_CHUNK
        # At least as many tokens as cost what the pass costs anyway: less would be mostly waste.
        wanted = max((limit - fixed) / each, fixed / each)
        # The line says little about what lies far beyond all that was seen.
        return _rounded(min(wanted, FAR * self._largest))

    def saw(self, *, prefilled: int, decoded: int, seconds: float) -> None:
        """Learn from one settled step of ``prefilled`` prompt tokens and ``decoded`` rows."""
        if seconds <= 0:
            return
        if not prefilled:
            if decoded:
                self.decode_seconds = _smooth(self.decode_seconds, seconds)
            return
        spent = max(seconds - (self.decode_seconds if decoded else 0.0), seconds * 0.1)
        seen = (1.0, prefilled, spent, prefilled**2, prefilled * spent)
        self._sums = tuple(MEMORY * a + b for a, b in zip(self._sums, seen, strict=True))  # type: ignore[assignment]
        self._largest = max(self._largest, prefilled)

    def _alone(self) -> int:
        fixed, each = self._line()
        if each <= 0:
            return ALONE_CHUNK
        return max(ALONE_CHUNK // 2, _rounded((ALONE_SECONDS - fixed) / each))

    def _line(self) -> tuple[float, float]:
        """Seconds of a pass and of each token in it, by least squares; never negative."""
        weight, tokens, seconds, squares, products = self._sums
        if not tokens:
            return 0.0, 0.0
        spread = weight * squares - tokens * tokens
        each = (weight * products - tokens * seconds) / spread if spread > 0.01 * squares else 0.0
        fixed = (seconds - each * tokens) / weight
        if each <= 0 or fixed < -0.05 * seconds / weight:
            # Too much alike to tell the two apart: a pass costs about what a decode does.
            fixed = min(self.decode_seconds, 0.8 * seconds / weight)
            each = (seconds - fixed * weight) / tokens
        return max(0.0, fixed), each


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
