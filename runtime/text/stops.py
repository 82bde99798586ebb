"""Stop strings: where an answer's text ends.

One matcher belongs to one request. It is an Aho-Corasick automaton over all stop strings, so its
work is linear in the text however the strings overlap, and it holds back exactly the longest end
of the text that may still become a stop string.

Rule: the text is read character by character and ends as soon as any stop string is complete. It
is cut where that string begins; if several are complete at the same character, the longest (which
begins first) counts. The order of the list and the way the text is cut into pieces mean nothing.
"""

from __future__ import annotations

from collections import deque


class StopMatcher:
    """Passes text through until a stop string is complete. Empty stop strings are ignored."""

    __slots__ = ("_depth", "_fail", "_found", "_held", "_next", "_state", "_stop_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop_length = [0]
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._state = 0
        self._held = ""
        self._found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._found is not None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._found

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show now, and whether the end was found. Silent after the end."""
        if self._found is not None:
            return "", True
        if len(self._next) == 1:
            return text, False
        whole = self._held + text
        for position in range(len(self._held), len(whole)):
            self._state = self._step(self._state, whole[position])
            if length := self._stop_length[self._state]:
                return self._end(whole, position + 1 - length, length), True
        safe = len(whole) - self._depth[self._state]
        self._held = whole[safe:]
        return whole[:safe], False

    def flush(self) -> str:
        """The text still held back, at the end of the answer; empty after a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _end(self, whole: str, start: int, length: int) -> str:
        self._found = whole[start : start + length]
        self._held = ""
        return whole[:start]

    def _step(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop_length.append(0)
            state = self._next[state][character]
        self._stop_length[state] = self._depth[state]

    def _link(self) -> list[int]:
        """Fail links, breadth first: the longest proper suffix that is also a prefix."""
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], character)
                if not self._stop_length[child]:
                    self._stop_length[child] = self._stop_length[self._fail[child]]
                queue.append(child)
        return self._fail
