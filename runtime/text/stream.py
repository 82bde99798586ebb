"""Generated ids to text deltas: detokenizer, reasoning splitter and stop strings in a row.

One stream belongs to one request and runs wherever its actor runs. Stop strings apply to the
visible content only, never to the reasoning (streamed or not, since both read this stream).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import TYPE_CHECKING

from ..requests import Channel, TextDelta
from .detokenizer import open_detokenizer
from .reasoning import ReasoningSplitter
from .stops import StopMatcher

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class TextStream:
    """Feed every generated id once, then finish; nothing comes out after a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        markers: tuple[str, str] | None = None,
        opens_reasoning: bool = False,
        eos_ids: AbstractSet[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = open_detokenizer(tokenizer)
        self._splitter = ReasoningSplitter(markers, opens_reasoning=opens_reasoning)
        self._matcher = StopMatcher(stop)
        self._eos_ids = eos_ids
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._content: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer."""
        return self._matcher.stopped

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.found

    def feed(self, token_id: int) -> tuple[TextDelta, ...]:
        """Text that is final now, at most one delta of each channel; none for an end token."""
        if self.stopped or token_id in self._eos_ids:
            return ()
        text = self._detokenizer.feed(token_id)
        self._ids.append(token_id)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        return self._pass_on(self._splitter.feed(text)) if text else ()

    def finish(self) -> tuple[TextDelta, ...]:
        """All text still held back, at the end of the generation."""
        if self.stopped:
            return ()
        text = self._detokenizer.finish()
        deltas = list(self._pass_on(chain(self._splitter.feed(text), self._splitter.finish())))
        if rest := self._matcher.flush():
            deltas += self._visible(rest)
        return tuple(deltas)

    @property
    def content_text(self) -> str:
        """The visible content that came out so far."""
        return "".join(self._content)

    @property
    def content_ids(self) -> tuple[int, ...]:
        """The generated ids that spell :attr:`content_text`, end tokens left out.

        Blank space that the splitter dropped may be part of the first id. Empty when no run of
        ids fits, as when a stop string cut a token in two. Costs time linear in the answer: ask
        once, at the end.
        """
        start, text = self._splitter.content_start, self.content_text
        if start is None or not text:
            return ()
        last = len(self._ids)
        if self.stopped:
            last = bisect_left(self._ends, start + len(text)) + 1
        first = bisect_left([0, *self._ends], start)
        for ids in (tuple(self._ids[first:last]), tuple(self._ids[max(first - 1, 0) : last])):
            spelled = self._spell(ids)
            if spelled == text or (start and spelled.lstrip() == text):
                return ids
        return ()

    def _spell(self, ids: tuple[int, ...]) -> str:
        detokenizer = open_detokenizer(self._tokenizer)
        return "".join(map(detokenizer.feed, ids)) + detokenizer.finish()

    def _pass_on(self, deltas: Iterable[TextDelta]) -> tuple[TextDelta, ...]:
        out: list[TextDelta] = []
        for delta in deltas:
            if delta.channel is Channel.REASONING:
                out.append(delta)
            elif safe := self._matcher.feed(delta.text)[0]:
                out += self._visible(safe)
        return tuple(out)

    def _visible(self, text: str) -> tuple[TextDelta]:
        self._content.append(text)
        return (TextDelta(Channel.CONTENT, text),)
