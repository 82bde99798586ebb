"""Why a prompt was not served further: where the nearest known prompt parts from it, and what kept
its state from being used.

Values and pure functions for ``index.py``. What is said is what the index knows: positions and
reasons. The ids of another prompt are told to nobody but the session that it belongs to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .tree import pack_ids, shared_ids, unpack_ids

Reason: TypeAlias = Literal[
    "nothing_kept",
    "text",
    "template",
    "tools",
    "tools_order",
    "adapters",
    "setup",
    "uncuttable",
    "threshold",
    "evicted",
    "too_large",
]
"""``nothing_kept``: no known prompt begins with the same token. ``text``: the nearest one goes on
otherwise; ``template``, ``tools``, ``tools_order``: and this is why, where it is known
(``text/renderings.py``). ``adapters``: its state was computed with others. ``uncuttable``: its
state is further and cannot be cut back. ``threshold``: it is encoded, a shorter one would not be.
``evicted``: its state was given up for room. ``setup``: its state lies on the disk, made by another
model, KV scheme or version. ``too_large``: it does, and memory could not keep it."""

AROUND = 8
"""Ids told on each side of a difference."""
MOST_GONE = 64
MOST_GONE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Nearest:
    """A known prompt that begins with the first ``shared`` ids of the one asked about.

    ``rest``: how its ids go on; empty where it ends. ``session``: whose it is.
    """

    shared: int
    rest: tuple[int, ...]
    session: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What was known of a prompt when it came.

    Attributes:
        memory_tokens: tokens of it that the memory tier could serve.
        shared_tokens: tokens of it that the nearest known prompt begins with, usable or not.
        reason: why no more than ``memory_tokens`` are served; None where nothing is missing.
        before, after: ids of the prompt before and from ``shared_tokens`` on, a few.
        theirs: how the nearest prompt goes on there, for the session that it belongs to.
    """

    memory_tokens: int
    shared_tokens: int
    reason: Reason | None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Gone:
    namespace: str
    ids: bytes
    session: str | None


class Gone:
    """The prompts whose states were given up last; a few, so that a miss can be explained."""

    def __init__(self) -> None:
        self._last: deque[_Gone] = deque()
        self._bytes = 0

    def add(self, namespace: str, ids: tuple[int, ...], session: str | None) -> None:
        """A state was given up for room."""
        self._last.append(_Gone(namespace, pack_ids(ids), session))
        self._bytes += len(self._last[-1].ids)
        while len(self._last) > MOST_GONE or self._bytes > MOST_GONE_BYTES:
            self._bytes -= len(self._last.popleft().ids)

    def nearest(self, ids: Sequence[int], namespace: str) -> Iterator[Nearest]:
        """Those of a namespace that share anything with ``ids``."""
        packed = pack_ids(ids)
        for gone in self._last:
            if gone.namespace == namespace and (shared := shared_ids(packed, gone.ids)):
                rest = unpack_ids(gone.ids)[shared : shared + AROUND]
                yield Nearest(shared, rest, gone.session)


def explain(
    ids: Sequence[int],
    usable: int,
    *,
    own: Nearest | None,
    others: Sequence[Nearest],
    gone: Sequence[Nearest],
    encoded: bool,
    session: str | None,
) -> Explanation:
    """Put together what is known: of the namespace itself, of other adapters, of evicted states.

    ``encoded``: the namespace's nearest state could be cut but for its threshold.
    """
    goal = len(ids) - 1
    known: list[tuple[int, Reason, Nearest]] = []
    if own is not None:
        reason: Reason = "text"
        if min(own.shared, goal) > usable:
            reason = "threshold" if encoded else "uncuttable"
        known.append((min(own.shared, goal), reason, own))
    known += [(min(n.shared, goal), "evicted", n) for n in gone]
    known += [(min(n.shared, goal), "adapters", n) for n in others]
    if not known:
        return Explanation(usable, 0, "nothing_kept" if goal else None, after=tuple(ids[:AROUND]))
    shared, why, nearest = max(known, key=lambda one: one[0])
    if usable >= goal or (why == "text" and not nearest.rest):
        return Explanation(usable, shared, None)
    theirs = nearest.rest if session is not None and session == nearest.session else ()
    before, after = ids[max(0, shared - AROUND) : shared], ids[shared : shared + AROUND]
    return Explanation(usable, shared, why, tuple(before), tuple(after), theirs)
