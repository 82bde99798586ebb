"""How the last chats were rendered, so that a prompt that parts from one can be told why.

Values and one bounded list, owned by whoever explains, on its task. What is remembered of a chat
are its ids, the settings of the template and digests of its messages; no text.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, TypeAlias

from ..prefix.tree import pack_ids, shared_ids, unpack_ids
from ..requests import ChatPrompt, Message

Cause: TypeAlias = Literal["template", "tools", "tools_order"]
"""``template``: its settings differ, or it renders the same messages otherwise. ``tools``: other
tools are offered. ``tools_order``: the same ones, in another order."""

MOST = 64
MOST_BYTES = 4 << 20
MOST_IDS = 1 << 16
"""Of a prompt that is noted, on the event loop: digests of a longer one take too long there."""
MOST_TRIED = 4
"""Chats that a prompt is compared with: each may have to be rendered anew."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """One chat as it was rendered.

    Attributes:
        ids: packed.
        settings: of the template, the tools among them.
        messages: digests.
    """

    ids: bytes
    settings: Mapping[str, object]
    messages: tuple[bytes, ...]

    @property
    def count(self) -> int:
        """Ids of the prompt."""
        return len(unpack_ids(self.ids))

    def explains(self, ids: Sequence[int], shared: int) -> bool:
        """Whether a prompt that shared so many ids with this one goes on as ``ids`` like it."""
        packed = pack_ids(ids)
        return packed == self.ids or shared_ids(self.ids, packed) > shared

    @property
    def nbytes(self) -> int:
        """What it costs in memory, roughly."""
        return len(self.ids) + 100 * len(self.messages) + len(_as_text(self.settings))


class Renderings:
    """The last ones."""

    def __init__(self) -> None:
        self._last: deque[tuple[Rendering, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._last)

    def note(self, ids: Sequence[int], prompt: ChatPrompt) -> None:
        """A chat was rendered to these ids. One of many is not noted: that takes too long."""
        if len(ids) > MOST_IDS:
            return
        made = Rendering(
            pack_ids(ids), prompt.template_kwargs, tuple(map(_digest, prompt.messages))
        )
        self._last.append((made, made.nbytes))
        self._bytes += made.nbytes
        while len(self._last) > MOST or self._bytes > MOST_BYTES:
            self._bytes -= self._last.popleft()[1]

    def parting_at(self, ids: Sequence[int], shared: int) -> Iterator[Rendering]:
        """Those that are the same as ``ids`` for ``shared`` ids and no further, newest first.

        One may end there: its answer is what went on otherwise.
        """
        packed, found = pack_ids(ids), 0
        for known, _ in reversed(self._last):
            same = shared_ids(packed, known.ids)
            if same == shared < len(ids):
                yield known
                found += 1
            if found == MOST_TRIED:
                return


def trials(prompt: ChatPrompt, known: Rendering) -> Iterator[tuple[Cause, ChatPrompt]]:
    """What to try: if the prompt, so changed, goes on like ``known``, that was the cause."""
    own, theirs = dict(prompt.template_kwargs), dict(known.settings)
    own_tools, their_tools = own.pop("tools", None), theirs.pop("tools", None)
    same_tools = _as_text(own_tools) == _as_text(their_tools)
    if not same_tools:
        cause: Cause = "tools_order" if _sorted(own_tools) == _sorted(their_tools) else "tools"
        yield cause, _rendered_with(prompt, own, their_tools)
    if not _are_same(own, theirs):
        yield "template", _rendered_with(prompt, theirs, own_tools)
        if not same_tools:
            yield "template", _rendered_with(prompt, theirs, their_tools)


def shows_otherwise(prompt: ChatPrompt, shared: int, known: Rendering) -> bool:
    """Whether a prompt that parts from ``known`` within it is the same chat with more messages,
    under the same settings: then the template shows what was there before otherwise."""
    count = len(known.messages)
    return (
        shared < known.count
        and len(prompt.messages) > count
        and _are_same(prompt.template_kwargs, known.settings)
        and tuple(map(_digest, prompt.messages[:count])) == known.messages
    )


def _rendered_with(prompt: ChatPrompt, settings: Mapping[str, object], tools: object) -> ChatPrompt:
    return replace(
        prompt, template_kwargs={**settings, **({} if tools is None else {"tools": tools})}
    )


def _are_same(own: Mapping[str, object], theirs: Mapping[str, object]) -> bool:
    return _as_text(sorted(own.items())) == _as_text(sorted(theirs.items()))


def _sorted(tools: object) -> list[str]:
    return sorted(map(_as_text, tools)) if isinstance(tools, list | tuple) else [_as_text(tools)]


def _digest(message: Message) -> bytes:
    text = _as_text((message.role, message.content, dict(message.extra)))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _as_text(value: object) -> str:
    """Two that are written alike; a template shows the keys of an object in their order."""
    return json.dumps(value, default=repr)
