"""Splits a model's reasoning from its answer.

One splitter belongs to one request. Rules, the same however the text is cut into pieces:

- Only a block at the very start of the answer is reasoning. Markers that come later, quoted or
  not, are content. Blank space (blank, tab, line end) before the opening marker is dropped.
- If the prompt already opened the block, the text starts inside it; a model that repeats the
  opening marker is forgiven.
- Blank space at both ends of the reasoning is dropped, so an empty block gives no reasoning.
- Blank space directly after the closing marker is dropped from the content.
- A block that is never closed is reasoning to its end; the content is then empty.
- Without markers everything is content.
"""

from __future__ import annotations

from enum import Enum, auto

from ..requests import Channel, TextDelta

_BLANK = " \t\r\n"


class _State(Enum):
    OPENING = auto()
    REASONING = auto()
    CLOSED = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Text in, deltas of two channels out; each feed costs time linear in its text."""

    def __init__(self, markers: tuple[str, str] | None, *, opens_reasoning: bool = False) -> None:
        self._open, self._close = markers or ("", "")
        self._in_block = opens_reasoning and markers is not None
        self._state = _State.CONTENT if markers is None else _State.OPENING
        self._text = ""
        self._blanks: list[str] = []
        self._reasoned = False
        self._fed = 0
        self._content_start = 0 if markers is None else None

    @property
    def content_start(self) -> int | None:
        """How many characters came before the content, or None while there is none."""
        return self._content_start

    def feed(self, text: str) -> tuple[TextDelta, ...]:
        """What this text settles, in order; at most one delta of each channel."""
        self._fed += len(text)
        self._text += text
        out: list[TextDelta] = []
        while self._advance(out):
            pass
        return tuple(out)

    def finish(self) -> tuple[TextDelta, ...]:
        """What was held back, now that no more text comes."""
        out: list[TextDelta] = []
        if self._state is _State.OPENING and not self._in_block:
            self._enter_content()
            self._advance(out)
        elif self._state in (_State.OPENING, _State.REASONING):
            self._reason(self._text, out)
            self._text = ""
        return tuple(out)

    def _advance(self, out: list[TextDelta]) -> bool:
        """One transition or emission; False when more text is needed."""
        if self._state is _State.OPENING:
            return self._opening()
        if self._state is _State.REASONING:
            return self._reasoning(out)
        if self._state is _State.CLOSED:
            self._text = self._text.lstrip(_BLANK)
            if self._text:
                self._enter_content()
            return bool(self._text)
        if self._text:
            out.append(TextDelta(Channel.CONTENT, self._text))
            self._text = ""
        return False

    def _opening(self) -> bool:
        body = self._text.lstrip(_BLANK)
        self._blanks.append(self._text[: len(self._text) - len(body)])
        self._text = body
        if body.startswith(self._open):
            self._text = body[len(self._open) :]
            self._blanks.clear()
            self._state = _State.REASONING
            return True
        if self._open.startswith(body):
            return False
        if self._in_block:
            self._blanks.clear()
            self._state = _State.REASONING
        else:
            self._enter_content()
        return True

    def _reasoning(self, out: list[TextDelta]) -> bool:
        before, closed, after = self._text.partition(self._close)
        if closed:
            self._reason(before, out)
            self._blanks.clear()
            self._text = after
            self._state = _State.CLOSED
            return True
        kept = _overlap(self._text, self._close)
        self._reason(self._text[: len(self._text) - kept], out)
        self._text = self._text[len(self._text) - kept :]
        return False

    def _reason(self, text: str, out: list[TextDelta]) -> None:
        """Emit reasoning, keeping back blank space that may turn out to be its end."""
        body = text.rstrip(_BLANK)
        if not body:
            self._blanks.append(text)
            return
        shown = "".join(self._blanks) + body
        self._blanks = [text[len(body) :]]
        if not self._reasoned:
            shown = shown.lstrip(_BLANK)
            self._reasoned = True
        out.append(TextDelta(Channel.REASONING, shown))

    def _enter_content(self) -> None:
        self._text = "".join(self._blanks) + self._text
        self._blanks.clear()
        self._content_start = self._fed - len(self._text)
        self._state = _State.CONTENT


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that begins ``marker`` without completing it."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
