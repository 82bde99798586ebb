"""Helpers for tests that open a whole runtime on the scripted device and virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from mlx_troupe.actors.system import Generation, Runtime, open_runtime
from mlx_troupe.actors.testing import InlineWorker, ScriptedDevice
from mlx_troupe.runtime.requests import (
    Failed,
    Finished,
    GenerationRequest,
    SamplingRequest,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.tokenizer import TemplateError

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
    device: ScriptedDevice | None = None, settings: Settings = SETTINGS, **changes: object
) -> AsyncIterator[tuple[Runtime, ScriptedDevice]]:
    """A runtime on a scripted device."""
    device = device or ScriptedDevice()
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    async with open_runtime(
        settings, tokenizer=WordTokenizer, worker=InlineWorker(device)
    ) as runtime:
        await runtime.wait_ready()
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


async def settle(runtime: Runtime) -> None:
    """Wait until nothing is active any more."""
    while runtime.stats()["requests"]["active"] or runtime.scheduler.core.everyone():  # type: ignore[index]
        await trio.sleep(0.01)
    await trio.sleep(0.1)
