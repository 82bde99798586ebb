"""Starts the permanent actors, restarts those that crash, and knows who is well.

One task per child. A child that crashes first answers everything that it has in hand
(:meth:`Actor.abandon`), then a new instance is built on the same mailbox. More crashes than its
allowance inside its window, or a :class:`Fatal` one, end the runtime: health says failed and the
error leaves :meth:`Supervisor.run`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from .reply import Bell

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 1.0
RESTART_PAUSE = 0.05
"""Lets the failed requests leave and /health be read before the next try."""


class Actor(Protocol):
    """A permanent member of the cast."""

    async def run(self) -> None:
        """The loop; returns only at shutdown."""
        ...

    def abandon(self, reason: str) -> None:
        """Answer everything in hand and in the mailbox; never waits, never raises."""
        ...


class Fatal(Exception):
    """A crash that a restart cannot mend."""


@dataclass(frozen=True, slots=True)
class Child:
    """How an actor is built, and how often it may crash within ``window`` seconds."""

    name: str
    build: Callable[[], Actor]
    restarts: int = 5
    window: float = 60.0


class Supervisor:
    """Keeps its children running and their states honest.

    ``on_failure`` is called once, with the reason, when the company cannot go on: it answers
    everyone who still waits, and must neither wait nor raise.
    """

    def __init__(
        self, children: Sequence[Child], bell: Bell, on_failure: Callable[[str], None]
    ) -> None:
        self._children = tuple(children)
        self._on_failure = on_failure
        self.states: dict[str, str] = {child.name: "starting" for child in children}
        self.crashes: dict[str, int] = {child.name: 0 for child in children}
        self.failure: str | None = None
        self.bell = bell

    async def run(self) -> None:
        """Run all children until cancelled. Raises what ended the company."""
        async with trio.open_nursery() as nursery:
            for child in self._children:
                nursery.start_soon(self._keep, child, name=child.name)

    async def fail(self, name: str, error: BaseException) -> None:
        """The company cannot go on: say so, and give the clients time to hear it."""
        self.states[name] = "failed"
        if self.failure is None:
            self.failure = f"{name}: {describe(error)}"
            self._on_failure(self.failure)
            self.bell.ring()
        await trio.sleep(FAREWELL_SECONDS)

    async def _keep(self, child: Child) -> None:
        crashed: deque[float] = deque()
        while True:
            actor = child.build()
            self.states[child.name] = "running"
            try:
                await actor.run()
                return
            except Exception as error:
                self.states[child.name] = "restarting"
                self.crashes[child.name] += 1
                _report(child.name, error)
                answered = _abandon(actor, f"{child.name} failed: {describe(error)}")
                now = trio.current_time()
                crashed.append(now)
                while now - crashed[0] > child.window:
                    crashed.popleft()
                if len(crashed) > child.restarts or _fatal(error) or not answered:
                    await self.fail(child.name, error)
                    raise
                await trio.sleep(RESTART_PAUSE)
            except BaseException:
                self.states[child.name] = "stopped"
                _abandon(actor, "the server is stopping")
                raise


def _report(name: str, error: Exception) -> None:
    if _fatal(error):
        # Foreseen, in words of its own, and told to the operator at the end.
        log.info("%s cannot go on: %s", name, describe(error))
    else:
        log.exception("%s crashed", name, exc_info=error)


def _abandon(actor: Actor, reason: str) -> bool:
    """Whether the actor could answer everyone. If it could not, only the end will."""
    try:
        actor.abandon(reason)
    except Exception:
        log.exception("an actor could not answer those who wait for it")
        return False
    return True


def _fatal(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_fatal(inner) for inner in error.exceptions)
    return isinstance(error, Fatal)


def describe(error: BaseException) -> str:
    """The innermost message of an error, without the wrapping of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
