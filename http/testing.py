"""A scripted runtime and a loopback server: what the edge's own tests run on.

Ships with the package, as the other fakes do. Nothing here computes; a script says which events a
generation yields and where it waits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import trio

from mlx_troupe.actors.spill_messages import FlushReport
from mlx_troupe.runtime.adapter_table import UNKNOWN
from mlx_troupe.runtime.adapters import AdapterDescription, AdapterInfo
from mlx_troupe.runtime.errors import AdapterError, TroupeError, Unavailable
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import (
    Channel,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TextDelta,
    Usage,
)
from mlx_troupe.runtime.settings import Settings

from .app import EdgeApp
from .server import Stop, serve

MODEL = ModelInfo("org/tiny-model", vocab_size=100, context_window=4096, eos_ids=frozenset({2}))
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2, lane="batched")


@dataclass(frozen=True, slots=True)
class Wait:
    """A step of a script: wait for ``gate`` (never, if it is not set)."""

    gate: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class Flood:
    """A step of a script: the same text for ever, as fast as it is read."""

    text: str


Step: TypeAlias = GenerationEvent | TroupeError | Wait | Flood | RuntimeError
Script: TypeAlias = Sequence[Step]


def said(*texts: str, reason: FinishReason = FinishReason.STOP) -> Script:
    """A script that says texts and finishes."""
    return (*(TextDelta(Channel.CONTENT, t) for t in texts), Finished(reason, USAGE))


def thought(text: str) -> TextDelta:
    """A piece of reasoning."""
    return TextDelta(Channel.REASONING, text)


class ScriptedGeneration:
    """Plays a script; an exception in it is raised where it stands."""

    prompt_tokens = USAGE.prompt_tokens
    created = 1_700_000_000
    resumed = False

    def __init__(self, script: Script, warnings: tuple[str, ...] = ()) -> None:
        self.warnings = warnings
        self._steps = list(script)
        self.events_read = 0

    async def next_event(self) -> GenerationEvent:
        """The next event of the script."""
        await trio.lowlevel.checkpoint()
        while isinstance(step := self._steps[0], Wait):
            await step.gate.wait()
            self._steps.pop(0)
        self.events_read += 1
        if isinstance(step, Flood):
            return TextDelta(Channel.CONTENT, step.text)
        self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


@dataclass(frozen=True, slots=True)
class ScriptedHealth:
    """A health that a test may choose."""

    status: str = "ok"
    reason: str = ""


class ScriptedRuntime:
    """A runtime that plays scripts; counts what was entered and left.

    ``script`` (says ``Hello`` if left out) is played by every generation, which has ``warnings``;
    ``refuse`` is raised instead, on entering.
    """

    def __init__(
        self,
        script: Script | Callable[[GenerationRequest], Script] | None = None,
        *,
        refuse: Exception | None = None,
        warnings: tuple[str, ...] = (),
        model: ModelInfo | None = MODEL,
        read_timeout: float = 120.0,
    ) -> None:
        self.settings = Settings(
            model=Path("unused"), name="org/tiny-model", read_timeout=read_timeout
        )
        self.model = model
        self.reported = ScriptedHealth()
        self.flushed: FlushReport | None = None
        self.sessions: set[str] = set()
        self.requests: list[GenerationRequest] = []
        self.generations: list[ScriptedGeneration] = []
        self.entered = 0
        self.left = 0
        self._leaving = trio.lowlevel.ParkingLot()
        self._script = script if script is not None else said("Hello")
        self._refuse = refuse
        self._warnings = warnings

    @property
    def active(self) -> int:
        """Generations that were entered and not left."""
        return self.entered - self.left

    def health(self) -> ScriptedHealth:
        """What the test set."""
        return self.reported

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """None: a script is not changed by adapters."""
        return ()

    def check_adapter(self, adapter: AdapterDescription) -> None:
        """Fits nothing."""
        raise AdapterError(f"{adapter.path} does not fit a script")

    async def mount_adapter(self, adapter_id: str, folder: Path) -> AdapterInfo:
        """Refuses."""
        await trio.lowlevel.checkpoint()
        raise AdapterError(f"{folder} does not fit a script")

    async def unmount_adapter(self, adapter_id: str) -> int:
        """Refuses."""
        await trio.lowlevel.checkpoint()
        raise AdapterError(f"adapter {adapter_id} is not mounted", code=UNKNOWN)

    async def close_session(self, session: str) -> bool:
        """Whether it was among ``sessions``."""
        known = session in self.sessions
        self.sessions.discard(session)
        return known

    async def flush_cache(self, seconds: float) -> FlushReport:
        """What the test set; there is no SSD cache otherwise."""
        await trio.lowlevel.checkpoint()
        if self.flushed is None:
            raise Unavailable("there is no SSD cache")
        return self.flushed

    def stats(self) -> Mapping[str, object]:
        """The figures that the edge exports."""
        return {
            "batch": {"active_rows": self.active, "pending_rows": 0, "kv_bytes": 512},
            "prompt_cache": {"entries": 1, "bytes": 4096, "hits": 3, "misses": 4},
        }

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[ScriptedGeneration]:
        """Play the script for one request."""
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        if self._refuse is not None:
            raise self._refuse
        script = self._script(request) if callable(self._script) else self._script
        generation = ScriptedGeneration(script, self._warnings)
        self.generations.append(generation)
        self.entered += 1
        try:
            yield generation
        finally:
            self.left += 1
            self._leaving.unpark_all()

    async def wait_left(self, count: int) -> None:
        """Wait until ``count`` generations were left."""
        while self.left < count:
            await self._leaving.park()


@asynccontextmanager
async def serving(app: EdgeApp, stop: Stop | None = None) -> AsyncIterator[str]:
    """Serve an app on a free loopback port; yields its base URL. Stops at once at the end."""
    stop = stop or Stop()
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(app, stop=stop, handle_signals=False, task_status=task_status)

        urls = await nursery.start(run)
        try:
            yield urls[0]
        finally:
            stop.drain.set()
            stop.now.set()
