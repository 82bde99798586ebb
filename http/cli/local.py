"""A model in this process for one person: opened, ready, and asked one thing at a time.

Used by ``chat`` and ``generate``. Owns the settings of such a runtime; knows no terminal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from ...runtime.requests import Failed, Finished, GenerationRequest, SamplingRequest, TextDelta
from ...runtime.settings import Dtype, Settings
from .options import GIB, default_prompt_cache

if TYPE_CHECKING:
    from ...actors.system import Runtime
    from ...runtime.requests import Prompt
    from ...runtime.store.resolve import ResolvedModel


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the flags of a command ask of every answer."""

    max_tokens: int | None
    sampling: SamplingRequest

    def request(self, prompt: Prompt) -> GenerationRequest:
        """The request for one answer."""
        return GenerationRequest(prompt, sampling=self.sampling, max_tokens=self.max_tokens)


def settings_for_one(model: ResolvedModel, dtype: Dtype) -> Settings:
    """One row at a time; prompts are kept, so that a chat's next turn starts where it ended."""
    return Settings(
        model=model.path,
        name=model.name,
        batch=1,
        queue=1,
        dtype=dtype,
        prompt_cache_bytes=int(default_prompt_cache() * GIB),
    )


@asynccontextmanager
async def open_ready(settings: Settings) -> AsyncIterator[Runtime]:
    """A runtime whose model is loaded. Raises ModelError."""
    from ...actors.system import open_runtime

    async with open_runtime(settings) as runtime:
        await runtime.wait_ready()
        yield runtime


async def answer(
    runtime: Runtime, request: GenerationRequest, show: Callable[[TextDelta], None]
) -> Finished:
    """Run one generation to its end. Raises the TroupeError that ended or refused it."""
    async with runtime.generate(request) as generation:
        while True:
            match await generation.next_event():
                case TextDelta() as delta:
                    show(delta)
                case Finished() as finished:
                    return finished
                case Failed(error):
                    raise error
                case never:
                    assert_never(never)
