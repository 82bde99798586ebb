"""Helpers for tests that open a whole runtime on the scripted device and virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from mlx_troupe.actors.disk import Disk
from mlx_troupe.actors.generation import Generation
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.requests import (
    Failed,
    Finished,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.tokenizer import TemplateError, Tokenizer

SETTINGS = Settings(Path("/nowhere"), "scripted", batch=4, queue=8)


class WordTokenizer:
    """Every id is a word of its own: 7 spells " 7". Enough for tests without a model."""

    eos_ids = frozenset({0})
    vocab_size = 1000
    bos_text = None
    table = None
    has_chat_template = False
    think_markers = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f" {i}" for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def render(self, messages: list[dict[str, object]], **_: object) -> str:
        raise TemplateError("no template")


@asynccontextmanager
async def company(
    device: ScriptedDevice | None = None,
    settings: Settings = SETTINGS,
    *,
    tokenizer: Tokenizer | Callable[[], Tokenizer] | None = None,
    disk: Disk | None = None,
    **changes: object,
) -> AsyncIterator[tuple[Runtime, ScriptedDevice]]:
    """A runtime on a scripted device."""
    device = device or ScriptedDevice()
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    worker = InlineWorker(device)
    # Made here, since virtual time runs away while a thread loads it.
    tokenizer = tokenizer or WordTokenizer()
    async with open_runtime(settings, tokenizer=tokenizer, worker=worker, disk=disk) as runtime:
        await runtime.wait_ready()
        # In virtual time a deadlock comes to this deadline at once.
        with trio.fail_after(100_000):
            yield runtime, device


def ask(*ids: int, max_tokens: int | None = 5, **more: object) -> GenerationRequest:
    """A greedy request for token ids."""
    return GenerationRequest(
        TokenPrompt(ids),
        SamplingRequest(temperature=0.0),
        max_tokens=max_tokens,
        **more,  # type: ignore[arg-type]
    )


async def read(generation: Generation) -> tuple[str, Finished | Failed]:
    """All text and the terminal event."""
    text = ""
    async for event in generation:
        if isinstance(event, TextDelta):
            text += event.text
        else:
            return text, event
    raise AssertionError("the generation ended without a terminal event")


async def run(runtime: Runtime, request: GenerationRequest) -> tuple[str, Finished | Failed]:
    """One request from start to end."""
    async with runtime.generate(request) as generation:
        return await read(generation)


def words(ids: Sequence[int]) -> str:
    """What ids spell."""
    return "".join(f" {i}" for i in ids if i)


def counted(start: int, tokens: int) -> str:
    """What a row whose prompt ends with ``start`` says on the counting script."""
    return words([(start - 1 + i) % 999 + 1 for i in range(1, tokens + 1)])


def nothing_left(runtime: Runtime, device: ScriptedDevice) -> None:
    """Raise AssertionError if a settled runtime holds on to anything."""
    core, cache = runtime.cast.scheduler.core, runtime.cast.cache.core
    core.check_integrity()
    cache.check_integrity()
    assert not core.everyone(), "rows are left in the scheduler"
    assert not device.rows, "rows are left on the device"
    assert cache.leases == 0, "a lease was not returned"
    assert set(device.snapshots) == set(cache.snapshots()), "a kept state leaked"
    assert not device.arriving, "a half of a state leaked"
    stats = runtime.stats()
    assert stats["requests"] == {"active": 0}
    batch = stats["batch"]
    assert isinstance(batch, dict)
    assert (batch["active_rows"], batch["pending_rows"]) == (0, 0)


async def settle(runtime: Runtime) -> None:
    """Wait until nothing is active any more and no step is under way."""
    await until(
        lambda: runtime.stats()["requests"] == {"active": 0} and not _is_busy(runtime), 0.01
    )
    await trio.sleep(0.1)


async def until(condition: Callable[[], object], pause: float = 0.001) -> None:
    """Wait, in small steps of virtual time, until something holds."""
    for _ in range(20_000):
        if condition():
            return
        await trio.sleep(pause)
    raise AssertionError("it never came to hold")


def _is_busy(runtime: Runtime) -> bool:
    core = runtime.cast.scheduler.core
    return bool(core.everyone()) or core.in_flight > 0
