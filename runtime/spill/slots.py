"""One file of the disk cache, as the books know it: its name, its place in a chain, who needs it.

Plain values; ``books.py`` owns every :class:`Slot`, and nobody else changes one but for its pins.
"""

from __future__ import annotations

from dataclasses import dataclass

from .index import FileKey

SUFFIX = ".safetensors"


def file_name(key: FileKey) -> str:
    """The file that holds an entry."""
    return key + SUFFIX


@dataclass(eq=False, slots=True)
class Slot:
    """One file that holds an entry.

    Attributes:
        digest: of its header.
        first, length: it holds the state of tokens [first, length).
        parent: the entry with the state of the first ``first`` tokens; None for a whole state.
        used_ns: when it was last saved or loaded; larger is more recent, 0 = nobody wants it.
        session: the chat that it belongs to; None if it is nobody's, or was closed.
        created: when it was written, in seconds since the epoch.
        children: how many entries continue it.
        pins: how many loads and saves under way need it.
        unwanted: it was dropped, and stays only for its children.
    """

    key: FileKey
    digest: str
    first: int
    length: int
    size: int
    parent: FileKey | None
    used_ns: int
    session: str | None = None
    created: float = 0.0
    children: int = 0
    pins: int = 0
    unwanted: bool = False
