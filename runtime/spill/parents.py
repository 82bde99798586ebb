"""What a state is written behind: the file that holds its first tokens, so that the rest suffices.

Part of a store, on its worker threads. A file that a state continues is looked at before anything
is written; what turns out to be damaged or replaced is forgotten there and then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..prefix.entries import Origin
from .faults import SpillFault, Unfit
from .folder import SpillFolder, make_key
from .header import Header
from .index import FileKey
from .rows import LastFile, RowFiles
from .sharing import LONGEST_CHAIN, fits, is_worth_sharing, starts_with
from .shelf import Shelf
from .slots import Slot
from .state import HostState, StateMismatch, check_continues


class Parents:
    """Finds and checks parents, and remembers what was written last of each row."""

    def __init__(self, shelf: Shelf, folder: SpillFolder) -> None:
        self._shelf = shelf
        self._folder = folder
        self._rows = RowFiles()

    def length(self, origin: Origin | None) -> int:
        """How many tokens of a row's next state its last file holds; 0 where that must be whole."""
        last = self._rows.last(origin)
        if last is None:
            return 0
        with self._shelf.lock:
            chain = self._shelf.books.chain(last.key)
        return chain[-1].length if last.ends(chain) and len(chain) < LONGEST_CHAIN else 0

    def last(self, origin: Origin | None) -> LastFile | None:
        """What was written last of a state's row."""
        return self._rows.last(origin)

    def note(self, origin: Origin | None, key: FileKey, digest: str) -> None:
        """A state was written."""
        self._rows.note(origin, key, digest)

    @contextmanager
    def pinned(
        self, header: Header, ids: Sequence[int], state: HostState, origin: Origin | None
    ) -> Iterator[tuple[Slot, ...]]:
        """The files that a state of ``ids`` continues, pinned; none for one that is written whole.

        Raises Unfit: the state is a delta, and what it was made to continue is not here.
        """
        last = self._rows.last(origin)
        if state.first:
            key = make_key(header.namespace, header.ids[: 4 * state.first])
            with self._shelf.pinned(key) as above:
                if not above or (origin is not None and not (last and last.ends(above))):
                    raise Unfit(f"there is no state of the first {state.first} tokens")
                yield above
            return
        with self._shelf.lock:
            found = self._shelf.books.prefixes(ids, header.namespace)[:1]
            if last is not None and last.key in self._shelf.books:
                found = (last.key,)
        with self._shelf.pinned(next(iter(found), None)) as above:
            known = last is not None and last.ends(above)
            yield above if self._begins(state, above, known) else ()

    def continued(
        self, above: Slot, header: Header, state: HostState, origin: Origin | None
    ) -> Header:
        """The header of a delta, after a look at the file that it continues. Raises SpillFault."""
        try:
            return self._continued(above, header, state)
        except SpillFault:
            # The row's next state had better be whole.
            self._rows.forget(origin)
            raise

    def _continued(self, above: Slot, header: Header, state: HostState) -> Header:
        parent = self._look(above)
        if len(parent.layers) != len(state.layers):
            raise Unfit(f"{len(state.layers)} layers behind {len(parent.layers)}")
        try:
            for before, after in zip(parent.layers, state.layers, strict=True):
                check_continues(before, after)
        except StateMismatch as error:
            raise Unfit(str(error)) from error
        return replace(header, first=state.first, parent=parent.digest)

    def _begins(self, state: HostState, chain: tuple[Slot, ...], known: bool) -> bool:
        """Whether a whole state begins, to the byte, with what these files hold.

        ``known``: it does, unless its form has changed.
        """
        if not 0 < len(chain) < LONGEST_CHAIN or chain[-1].length >= state.length:
            return False
        if not is_worth_sharing(state, chain[-1].length):
            return False
        try:
            if known:
                return fits(state, self._look(chain[-1]))
            return starts_with(state, map(self._look, chain))
        except SpillFault as fault:
            self._shelf.count_fault(fault)
            return False

    def _look(self, slot: Slot) -> Header:
        """The header of the very file in the books. Raises SpillFault."""
        try:
            header = self._folder.header(slot.key)
        except SpillFault as fault:
            self._shelf.reject(slot.key, slot.size, fault)
            raise
        if header.digest != slot.digest:
            self._shelf.forget(slot.key)
            raise Unfit("the file of the state to be continued was replaced")
        return header
