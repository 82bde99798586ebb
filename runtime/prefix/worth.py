"""Which kept state goes first when there is no room for all.

Pure functions for ``index.py``, which owns the entries and the order of their use.

    worth = tokens that nobody else could serve × expected uses / bytes

Only the less recently used half of the states is weighed, at most AGED of them: who was here a
moment ago is expected back. The one of least worth goes, the least recently used among equals; so
states that are alike go in plain order of use. Those older than it were spared for what they were
used for in the past, and half of that is forgotten: nothing stays for ever. States of closed
sessions go before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from .entries import Entry

AGED = 16
"""States that are weighed against each other."""
MOST_USES = 64
"""Uses beyond this say nothing more, and take no longer to be forgotten."""


def note_use(entry: Entry, session: str | None) -> None:
    """A prompt was served by ``entry``: it may well serve another one."""
    entry.uses = min(entry.uses + 1, MOST_USES)
    entry.shared = entry.shared or session is None or session != entry.session


def inherit(entry: Entry, replaced: Iterable[Entry]) -> None:
    """``entry`` serves all that the ones it replaces did, and is as likely to be asked."""
    for old in replaced:
        entry.uses = max(entry.uses, old.uses)
        entry.shared = entry.shared or old.shared or old.session not in (None, entry.session)


def worth(entry: Entry, lost: int) -> float:
    """What is lost with ``entry``, of whose tokens ``lost`` would have to be computed again.

    The next turn of an open session is expected, which counts as one more use of each past one.
    """
    uses = entry.uses * (1 if entry.session is None else 2)
    return lost * uses / max(1, entry.nbytes)


def num_weighed(entries: int) -> int:
    """How many of so many entries are weighed against each other."""
    return min(AGED, max(1, entries // 2))


def choose(by_age: Iterable[Entry], count: int, lost: Callable[[Entry], int]) -> Entry | None:
    """The entry that goes next, of the first ``count`` that may; the oldest come first."""
    aged = list(islice(by_age, count))
    if not aged:
        return None
    victim = min(aged, key=lambda entry: worth(entry, lost(entry)))
    for spared in aged[: aged.index(victim)]:
        spared.uses = max(1, spared.uses // 2)
    return victim
