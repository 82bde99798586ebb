"""Which chat a request says that it belongs to, and the end of one, on the wire.

Pure functions and data. The first of these that is not empty counts: ``session_id`` in the body,
``prompt_cache_key`` in the body, the header ``X-Session-Affinity``, the header ``session_id``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct

LONGEST_NAME = 128
HEADERS = ("x-session-affinity", "session_id")


class CloseRequest(Struct):
    """Body of ``POST /admin/cache/session/close``."""

    session_id: Annotated[str, Meta(min_length=1)]


class CloseReply(Struct):
    """Whether anything was kept for the session."""

    closed: bool


def session_of(*names: str | None) -> str | None:
    """The first name that says something; a very long one is told apart by its digest."""
    name = next((name for name in names if name), None)
    if name is None or len(name) <= LONGEST_NAME:
        return name
    return hashlib.blake2b(name.encode(), digest_size=32).hexdigest()


def session_in(header: Callable[[str], str | None]) -> str | None:
    """The session that a request's headers name; ``header`` looks one up, in any case."""
    return session_of(*map(header, HEADERS))
