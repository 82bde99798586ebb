"""What prefill costs: learned from steps that were measured, asked before steps that come.

A pass over the weights costs something however few tokens it processes, each token costs the same
again, and attention costs the more the further back a token looks: seconds = fixed + each · work,
where work is tokens + (pairs of a token and one before it) / *doubling*, the depth at which a token
costs twice what it costs at the beginning. Which doubling a model and machine have is found out: a
line is fitted for each of a range of them. Where prompts stood at the same depth for a while, many
lines were right and say the same of it; of other depths they do not, and the most cautious of them
is believed. Plain arithmetic; runs inside the scheduler's core.
"""

from __future__ import annotations

import math

DOUBLINGS = (*(float(1 << n) for n in range(8, 18)), math.inf)
"""Depths in tokens. Infinite: windows and recurrent states, where depth costs nothing."""
MEMORY = 0.9
"""What an observation is worth after the next one."""
TRUST = 0.95
"""The same of a prediction's error, which is the square of the logarithm of how far off it was."""
MARGIN = 0.05
"""How much more error than the best line's one may have and be believed."""
ANCHOR = 0.3
"""Observations that a pass without tokens counts as, taken to cost what a decode does. Steps of one
size, or noise, say nothing else about what a pass costs by itself."""
MOSTLY = 2 / 3
"""What a pass that costs more than a decode can be of a step's time, so that noise doubles a chunk
at most."""


class PrefillCosts:
    """Fits one line for each doubling."""

    def __init__(self) -> None:
        self._lines = tuple(_Line(doubling) for doubling in DOUBLINGS)

    def saw(self, *, tokens: int, pairs: float, seconds: float, decode: float) -> None:
        """Learn from a pass; ``decode`` is what a step without prefill costs, 0 if unknown."""
        for line in self._lines:
            line.saw(tokens, pairs, seconds, decode)

    def tokens_in(
        self, seconds: float, depth: int, *, decode: float, wasteful: bool = False
    ) -> float | None:
        """Tokens behind ``depth`` others that take so long; None while nothing is known.

        At least as many as cost what the pass costs anyway, unless that may be ``wasteful``.
        """
        most = min(line.error for line in self._lines) + MARGIN
        believed = [line for line in self._lines if line.error <= most]
        if not all(line.known for line in believed):
            return None
        return min(line.tokens_in(seconds, depth, decode, wasteful) for line in believed)


class _Line:
    """Decaying observations of one doubling, and how wrong their line was lately."""

    def __init__(self, doubling: float) -> None:
        self._doubling = doubling
        self.error = 0.0
        # Sums of weight, work, seconds, work², work·seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def known(self) -> bool:
        return self._sums[0] > 0

    def saw(self, tokens: int, pairs: float, seconds: float, decode: float) -> None:
        work = tokens + pairs / self._doubling
        if self.known:
            fixed, each = self._fit(decode)
            off = math.log((fixed + each * work) / seconds)
            self.error = TRUST * self.error + off * off
        seen = (1.0, work, seconds, work * work, work * seconds)
        self._sums = tuple(MEMORY * a + b for a, b in zip(self._sums, seen, strict=True))  # type: ignore[assignment]

    def tokens_in(self, seconds: float, depth: int, decode: float, wasteful: bool) -> float:
        fixed, each = self._fit(decode)
        work = max(seconds - fixed, 0.0 if wasteful else fixed) / each
        first = 1 + depth / self._doubling
        return 2 * work / (first + math.sqrt(first * first + 2 * work / self._doubling))

    def _fit(self, decode: float) -> tuple[float, float]:
        """Seconds of a pass and of each unit of work, by least squares; never negative."""
        weight, work, seconds, squares, products = self._sums
        mean = seconds / weight
        weight_all = weight + ANCHOR
        seconds_all = seconds + ANCHOR * min(decode, mean)
        each = weight_all * products - work * seconds_all
        each /= weight_all * squares - work * work
        fixed = (seconds_all - each * work) / weight_all
        most = max(MOSTLY * mean, min(decode, 0.9 * mean))
        fixed = min(max(fixed, 0.0), most)
        return fixed, (seconds - fixed * weight) / work
