"""Which kept states are written to the disk, in which order, and which are not.

The core of the ``Spill`` actor's writing side, run by its task and by nobody else; it never waits.
It knows states by their snapshots, ids and sizes, and neither the device nor the disk. States that
the memory tier has let go while they wait here belong to the queue, within a bound, until they are
written (on a CPU views of them are what is written): every method that ends such a state's use
notes it, and :meth:`SaveQueue.take_freed` says, exactly once, what the device may forget.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Literal, TypeAlias

import numpy as np

from ..plans import SnapshotId
from .budget import WriteBudget
from .candidates import Candidate

SEEN = 4096
"""States refused at their first offer that are remembered for their second."""

Offer: TypeAlias = Literal["queued", "here", "full", "postponed"]
"""What became of an offered state: it waits, it waited already, there is no room for its bytes, or
it must be asked for once more before it is worth a part of the budget that is left."""


@dataclass(slots=True)
class _InHand:
    candidate: Candidate
    copied: int
    on_device: bool = True


class SaveQueue:
    """States that wait to be written, oldest first, and those that are being written.

    Args:
        bound: bytes of states that may wait; a further one is refused, unless it is alone: what a
            running row has gained since its last file may be little of a large state.
        keep: bytes of states that may stay on the device only to be written, after the memory tier
            has let go of them. Beyond it such a state is given up.
        counts: where to count on, after a queue that was lost.
    """

    def __init__(
        self, bound: int, keep: int, budget: WriteBudget, counts: Counter[str] | None = None
    ) -> None:
        self._bound = bound
        self._keep = keep
        self.budget = budget
        self._waiting: dict[SnapshotId, Candidate] = {}
        self._place: dict[SnapshotId, int] = {}
        self._places = count()
        self._in_hand: dict[SnapshotId, _InHand] = {}
        self._owned: set[SnapshotId] = set()
        self._owned_bytes = 0
        self._bytes = 0
        self._freed: list[SnapshotId] = []
        self._unfit: set[SnapshotId] = set()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.counts: Counter[str] = Counter() if counts is None else counts
        # Whether bytes that leave the device are copies; only who asks for them can know.
        self.copies = False

    def __len__(self) -> int:
        """States that are not written yet, those in hand included."""
        return len(self._waiting) + len(self._in_hand)

    @property
    def bytes(self) -> int:
        """What they come to."""
        return self._bytes

    @property
    def on_device(self) -> int:
        """How many of them have not left the device yet."""
        return len(self._waiting) + sum(hand.on_device for hand in self._in_hand.values())

    @property
    def owned(self) -> tuple[SnapshotId, ...]:
        """States that stay on the device for the queue alone."""
        return tuple(self._owned)

    @property
    def owned_bytes(self) -> int:
        """What they take."""
        return self._owned_bytes

    @property
    def copied_bytes(self) -> int:
        """At most what copies of states in hand take in host memory; views of states take none."""
        return self.copies * sum(hand.copied for hand in self._in_hand.values())

    @property
    def is_pressed(self) -> bool:
        """Whether states are about to be given up because memory let them go too fast."""
        return 2 * self._owned_bytes > self._keep

    def take_freed(self) -> tuple[SnapshotId, ...]:
        """States that nobody needs on the device any more, each told once."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def offer(self, candidate: Candidate, now: float) -> Offer:
        """Ask for a state to be written.

        Those that wait and that it covers need not be written any more, unless it is refused. One
        that is refused stays with whoever offered it.
        """
        if candidate.snapshot in self._waiting or candidate.snapshot in self._in_hand:
            return "here"
        scarce = self.budget.is_scarce(now) and not candidate.is_urgent
        if scarce and not self._is_second(candidate):
            self.counts["postponed"] += 1
            return "postponed"
        replaced = [other for other in self._waiting.values() if candidate.replaces(other)]
        others = self._bytes - sum(other.nbytes for other in replaced)
        if others and others + candidate.nbytes > self._bound:
            self.counts["dropped"] += 1
            return "full"
        place = next(self._places)
        for other in replaced:
            # Whoever is replaced again and again waits no longer for it than others do.
            place = min(place, self._place[other.snapshot])
            self._leave(other, "superseded")
        self._waiting[candidate.snapshot] = candidate
        self._place[candidate.snapshot] = place
        self._bytes += candidate.nbytes
        return "queued"

    def let_go(self, snapshots: Iterable[SnapshotId]) -> None:
        """The memory tier has no use for these states any more."""
        for snapshot in snapshots:
            self._unfit.discard(snapshot)
            waiting = self._waiting.get(snapshot)
            if waiting is not None and self._owned_bytes + waiting.nbytes <= self._keep:
                self._own(waiting)
            elif waiting is not None:
                self._own(waiting)
                self._leave(waiting, "dropped")
            elif (hand := self._in_hand.get(snapshot)) is not None:
                self._own(hand.candidate)
            else:
                self._freed.append(snapshot)

    def close_session(self, session: str) -> None:
        """States of this chat are nobody's."""
        for snapshot, waiting in self._waiting.items():
            if waiting.session == session:
                self._waiting[snapshot] = replace(waiting, session=None)
        for hand in self._in_hand.values():
            if hand.candidate.session == session:
                hand.candidate = replace(hand.candidate, session=None)

    def session_of(self, candidate: Candidate) -> str | None:
        """The chat of a state in hand, unless it was closed."""
        return self._hand(candidate).candidate.session

    def take(self, now: float, *, urgent: bool = False) -> Candidate | None:
        """The next state to write, which is then in hand; those over the budget are given up.

        Of each row one is in hand at a time, so that the next one can continue it. Urgent ones are
        taken by those who ask for such, and by nobody else; what they take is known only when they
        are exported, for most of it may be on the disk (see :meth:`may_write`).
        """
        busy = {hand.candidate.row for hand in self._in_hand.values()}
        for candidate in sorted(self._waiting.values(), key=lambda c: self._place[c.snapshot]):
            held_up = candidate.row is not None and candidate.row in busy
            if held_up or candidate.is_urgent is not urgent:
                continue
            if urgent or self.budget.allows(candidate.nbytes, now):
                del self._waiting[candidate.snapshot], self._place[candidate.snapshot]
                self._in_hand[candidate.snapshot] = _InHand(candidate, candidate.nbytes)
                return candidate
            self._leave(candidate, "over_budget")
        return None

    def copying(self, candidate: Candidate, nbytes: int) -> None:
        """Of a state in hand so many bytes are asked for, or were had: what it gained since a file
        of its row is little of it."""
        self._hand(candidate).copied = nbytes

    def exported(self, candidate: Candidate) -> None:
        """All bytes of a state in hand have been had; views of it may be among them."""
        self._hand(candidate).on_device = False

    def may_write(self, candidate: Candidate, nbytes: int, now: float) -> bool:
        """Whether the budget has room for what a state in hand really takes; else it is out."""
        if self.budget.allows(nbytes, now):
            return True
        self._end(candidate, "over_budget")
        return False

    def written(self, candidate: Candidate, nbytes: int, now: float) -> None:
        """A state in hand is on the disk, at the cost of ``nbytes`` written."""
        self.budget.charge(nbytes, now)
        self.counts["bytes_written"] += nbytes
        self._end(candidate, "written")

    def failed(self, candidate: Candidate) -> None:
        """A state in hand could not be written."""
        self._end(candidate, "failed")

    def unfitting(self, candidate: Candidate) -> None:
        """A state in hand is larger than there may ever be room for."""
        if candidate.snapshot not in self._owned:
            self._unfit.add(candidate.snapshot)
        self._end(candidate, "dropped")

    def take_unfit(self) -> frozenset[SnapshotId]:
        """States that were too large and that the memory tier still has, each told once."""
        unfit, self._unfit = frozenset(self._unfit), set()
        return unfit

    def needless(self, candidate: Candidate) -> None:
        """A state in hand turned out to be gone, or to be on the disk already."""
        self._end(candidate, "superseded")

    def lost(self) -> None:
        """The device lost every state; one that has left it is still written."""
        for candidate in self._waiting.values():
            self._bytes -= candidate.nbytes
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        self._place.clear()
        self._owned.clear()
        self._owned_bytes = 0
        self._freed.clear()
        self._unfit.clear()

    def _hand(self, candidate: Candidate) -> _InHand:
        hand = self._in_hand.get(candidate.snapshot)
        if hand is None:
            raise ValueError(f"state {candidate.snapshot} is not in hand")
        return hand

    def _is_second(self, candidate: Candidate) -> bool:
        """Whether the same state was offered before; the first offer is remembered."""
        digest = blake2b(candidate.namespace.encode(), digest_size=16)
        digest.update(np.asarray(candidate.ids, dtype=np.int64).tobytes())
        key = digest.digest()
        if self._seen.pop(key, b"") is None:
            return True
        self._seen[key] = None
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return False

    def _leave(self, candidate: Candidate, why: str) -> None:
        """A state that waits is not going to be written."""
        del self._waiting[candidate.snapshot], self._place[candidate.snapshot]
        self._bytes -= candidate.nbytes
        self.counts[why] += 1
        self._disown(candidate)

    def _end(self, candidate: Candidate, how: str) -> None:
        self._hand(candidate)
        del self._in_hand[candidate.snapshot]
        self._bytes -= candidate.nbytes
        self.counts[how] += 1
        self._disown(candidate)

    def _own(self, candidate: Candidate) -> None:
        if candidate.snapshot not in self._owned:
            self._owned.add(candidate.snapshot)
            self._owned_bytes += candidate.nbytes

    def _disown(self, candidate: Candidate) -> None:
        if candidate.snapshot in self._owned:
            self._owned.remove(candidate.snapshot)
            self._owned_bytes -= candidate.nbytes
            self._freed.append(candidate.snapshot)

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the books do not agree. For tests."""
        held = list(self._waiting.values())
        held += [hand.candidate for hand in self._in_hand.values()]
        assert len(held) <= 1 or self._bytes <= self._bound, "more waits than may"
        assert self._bytes == sum(c.nbytes for c in held), "bytes are not their sum"
        sizes = {c.snapshot: c.nbytes for c in held}
        assert self._owned <= sizes.keys(), "a state is kept for nothing"
        assert self._owned_bytes == sum(sizes[s] for s in self._owned), "kept bytes are not theirs"
        assert self._place.keys() == self._waiting.keys(), "a state has no place"
        for snapshot, waiting in self._waiting.items():
            assert snapshot == waiting.snapshot, "a state waits under another name"
