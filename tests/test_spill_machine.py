"""Any sequence of what happens to a spill folder: states are right, books agree, the cap holds."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from spill_rig import ODD, Ticks, entry, entry_files, folder_bytes, opened, state

from mlx_troupe.runtime.spill.faults import Absent, Corrupt, SpillFault, TooLarge, Unfit
from mlx_troupe.runtime.spill.store import SpillEntry

CHAINS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9, 9), (7, 7, 7))
CAPS = st.sampled_from((None, 1_500, 5_000, 12_000))
entries = st.builds(
    lambda ids, length, namespace, cuttable: entry(
        *ids[:length], namespace=namespace, cuttable=cuttable
    ),
    st.sampled_from(CHAINS),
    st.integers(1, 6),
    st.sampled_from(("one", "two", ODD)),
    st.just(True),
)


class Folder(RuleBasedStateMachine):
    """A folder, a store on it, and what may be found there: a superset of what is."""

    @initialize(cap=CAPS)
    def start(self, cap: int | None) -> None:
        """An empty folder."""
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Ticks()
        self.cap = cap
        self.saved: set[SpillEntry] = set()
        self.damaged = False
        self.rotten = False  # a start reads headers only, so it need not find what was harmed
        self.store = opened(self.folder, max_bytes=cap, clock=self.clock)

    def teardown(self) -> None:
        """Nothing stays behind."""
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(made=entries, first=st.integers(0, 5))
    def save(self, made: SpillEntry, first: int) -> None:
        """Whole, or as a delta behind what may or may not be there."""
        first = first if first < len(made.ids) and made.namespace != ODD else 0
        try:
            self.store.save(made, state(made, first))
        except TooLarge:
            assert self.cap is not None
        except Unfit:
            assert first
            assert not self.store.has(made.key)
        except (Absent, Corrupt):
            assert first
            assert self.damaged or self.rotten
        else:
            self.saved.add(made)
            assert self.damaged or self.rotten or self.store.load(made.key).state == state(made)

    @rule(made=entries, upto=st.none() | st.integers(1, 6))
    def load(self, made: SpillEntry, upto: int | None) -> None:
        """The right state, or a shorter one that is long enough, or a miss."""
        try:
            found = self.store.load(made.key, upto=upto)
        except Absent:
            assert made not in self.saved or not self.store.has(made.key)
        except SpillFault:
            assert self.damaged or self.rotten
            assert not self.store.has(made.key)
        else:
            assert made in self.saved
            assert found.ids == made.ids[: len(found.ids)]
            assert len(found.ids) >= min(upto or len(made.ids), len(made.ids))
            assert found.state == state(entry(*found.ids, namespace=made.namespace))

    @rule(made=entries, more=st.integers(0, 9))
    def lookup(self, made: SpillEntry, more: int) -> None:
        """What is found shares as many tokens as is said, and no other entry shares more."""
        ids = (*made.ids, more)
        hit = self.store.lookup(ids, made.namespace)
        shares = [
            min(_shared(other.ids, ids), len(ids) - 1)
            for other in self.saved
            if other.namespace == made.namespace and self._is_listed(other)
        ]
        assert (0 if hit is None else hit.length) == max(shares, default=0)
        if hit is not None:
            (other,) = [o for o in self.saved if o.key == hit.key]
            assert _shared(other.ids, ids) >= hit.length
            assert hit.state_length == len(other.ids)

    @rule(made=entries)
    def drop(self, made: SpillEntry) -> None:
        """It is not found again until it is saved again."""
        self.store.drop(made.key)
        assert not self._is_listed(made)

    @rule(cap=CAPS)
    def restart(self, cap: int | None) -> None:
        """Another process opens the folder."""
        self.cap = cap
        before = {made for made in self.saved if self.store.has(made.key)}
        self.store = opened(self.folder, max_bytes=cap, clock=self.clock)
        if cap is None and not self.damaged:
            assert {made for made in self.saved if self.store.has(made.key)} == before
        self.damaged = False

    @precondition(lambda self: bool(entry_files(self.folder)))
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A byte of a file changes."""
        path = data.draw(st.sampled_from(entry_files(self.folder)))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 0x40
        path.write_bytes(content)
        self.damaged = self.rotten = True

    @precondition(lambda self: bool(entry_files(self.folder)))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A file vanishes."""
        data.draw(st.sampled_from(entry_files(self.folder))).unlink()
        self.damaged = True

    @rule(made=entries)
    def save_elsewhere(self, made: SpillEntry) -> None:
        """Another store on the folder writes an entry."""
        other = opened(self.folder, max_bytes=self.cap, clock=self.clock)
        try:
            other.save(made, state(made))
        except TooLarge:
            return
        self.saved.add(made)
        self.damaged = True  # what it evicted is missed here

    @invariant()
    def agrees(self) -> None:
        """Books, index and folder say the same; the cap holds."""
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        size = folder_bytes(self.folder)
        if not self.damaged:
            assert self.store.stats().bytes == size
        assert self.cap is None or size <= self.cap
        assert not list(self.folder.glob(".*"))

    def _is_listed(self, made: SpillEntry) -> bool:
        hit = self.store.lookup((*made.ids, 0), made.namespace)
        return hit is not None and hit.key == made.key


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


TestFolder = Folder.TestCase
TestFolder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
