"""What the HTTP edge asks of the runtime, and the one value that its parts share.

Owns no task. The edge never imports a concrete runtime: whatever has these methods is served, so
the routes run in tests against a script (``http/testing.py``) and in production against
``actors/system.py``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from mlx_troupe.actors.spill_messages import FlushReport
    from mlx_troupe.runtime.adapters import AdapterDescription, AdapterInfo
    from mlx_troupe.runtime.model_info import ModelInfo
    from mlx_troupe.runtime.requests import GenerationEvent, GenerationRequest
    from mlx_troupe.runtime.settings import Settings

    from .metrics import Metrics


class HealthLike(Protocol):
    """``status`` is ``"ok"`` or says what is wrong; ``reason`` is for people."""

    @property
    def status(self) -> str: ...

    @property
    def reason(self) -> str: ...


class GenerationLike(Protocol):
    """One admitted generation."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the client asked for and does not get, in words."""
        ...

    @property
    def created(self) -> int:
        """When the answer was begun, in Unix seconds."""
        ...

    @property
    def resumed(self) -> bool:
        """Its events are, from the first one, those of an answer that the client has read of."""
        ...

    async def next_event(self) -> GenerationEvent:
        """Wait for the next event; never called again after a terminal one.

        Must be safe to cancel: either it returns an event, or it raises ``trio.Cancelled`` and
        the event is still there for the next call (keepalives are sent by timing it out).
        """
        ...


class RuntimeLike(Protocol):
    """The runtime's front door, as far as the edge uses it."""

    @property
    def settings(self) -> Settings: ...

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; None while it loads."""
        ...

    def health(self) -> HealthLike: ...

    def stats(self) -> Mapping[str, object]:
        """A JSON-able picture of the runtime; cheap."""
        ...

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The mounted adapters, in the order of mounting."""
        ...

    def check_adapter(self, adapter: AdapterDescription) -> None:
        """Raise AdapterError for one that the loaded model cannot take; from any thread."""
        ...

    async def mount_adapter(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Mount or replace. Raises AdapterError, Overloaded or Unavailable."""
        ...

    async def unmount_adapter(self, adapter_id: str) -> int:
        """How many modules it changed. Raises AdapterError, Overloaded or Unavailable."""
        ...

    async def close_session(self, session: str) -> bool:
        """Whether anything was kept of the session. Raises Overloaded or Unavailable."""
        ...

    async def flush_cache(self, seconds: float) -> FlushReport:
        """Make kept prompts durable, within so many seconds. Raises Overloaded or Unavailable."""
        ...

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[GenerationLike]:
        """Entering admits the request or raises a ``TroupeError``; leaving cancels the rest."""
        ...


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP edge; times are in seconds.

    Attributes:
        host: address that the server is bound to; also an allowed name in the Host header.
        port: port to bind; 0 = any free one.
        allowed_hosts: further names allowed in the Host header; ``"*"`` turns the check off.
        cors_origins: origins that browsers may call from (``"*"`` = any, always without
            credentials); empty = no CORS headers at all.
        max_body_bytes: largest request body; beyond it 413.
        body_timeout: how long a client may take to send its body; beyond it 408.
        keepalive_interval: silence in a stream after which a comment is sent; 0 = never.
        idle_timeout: how long a kept-alive connection may be idle between requests.
        drain_timeout: how long running answers may go on after the first stop signal.
        adapter_dirs: directories under which clients may mount adapter folders.
        sessions: whether the names that requests give their chats are listened to.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    body_timeout: float = 60.0
    keepalive_interval: float = 15.0
    idle_timeout: float = 75.0
    drain_timeout: float = 30.0
    adapter_dirs: tuple[Path, ...] = ()
    sessions: bool = True


@dataclass(slots=True)
class Edge:
    """What all routes share. ``draining`` is set once, by the server, and never unset."""

    runtime: RuntimeLike
    settings: HttpSettings
    metrics: Metrics
    started_at: float = field(default_factory=time.time)
    draining: bool = False

    @property
    def model_name(self) -> str:
        """The id that replies carry, whatever name the client sent."""
        model = self.runtime.model
        return model.name if model is not None else self.runtime.settings.name
