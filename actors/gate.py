"""The front door's count of clients, and the bounds of every mailbox that follow from it.

Lives on trio's thread. A client takes a place before its Request actor starts, and gives it back
only when the scheduler has taken that actor's one Cancel out of its mailbox. So no more than one
Submit and one Cancel a place are ever under way, whoever is being restarted meanwhile, and a
Cancel can never find the mailbox full.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much room each mailbox needs for a batch and a queue of a given size."""

    batch: int
    queue: int

    @property
    def places(self) -> int:
        """Clients inside at once. Twice what is served, so that the queue's own limit is met
        first: those beyond it are leaving, or about to be refused by the scheduler."""
        return 2 * (self.batch + self.queue) + 16

    @property
    def leases(self) -> int:
        """Kept states lent at once: a row's own, those of two steps under way, and stragglers."""
        return 4 * self.batch

    @property
    def lookups(self) -> int:
        """Lookups and puts that may wait for the cache; one more is a miss, or is dropped."""
        return 4 * self.batch + 64

    @property
    def cache_spare(self) -> int:
        """Room that lookups and puts may not use: the end of every lease, of six incarnations of
        the cache (its restart allowance), restores that end, and what others tell it."""
        return 6 * self.leases + 64

    @property
    def cache(self) -> int:
        """The cache's mailbox."""
        return self.lookups + self.cache_spare

    @property
    def scheduler(self) -> int:
        """The scheduler's mailbox: a submit and a cancel a place, an answer a lookup, and a few
        results and notices from the device and the cache."""
        return 2 * self.places + self.lookups + 64


class Gate:
    """Places for clients."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0

    def try_enter(self) -> bool:
        """Take a place; False when there is none."""
        if self.taken >= self.places:
            return False
        self.taken += 1
        return True

    def leave(self) -> None:
        """Give a place back."""
        if self.taken < 1:
            raise ValueError("more clients left than came in")
        self.taken -= 1
