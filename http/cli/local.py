"""A model in this process for one person: opened, ready, and asked one thing at a time.

Used by ``chat`` and ``generate``, on the main thread, where Ctrl-C arrives; the company runs in
another. Owns the settings of such a runtime; knows no terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from ...runtime.errors import GenerationFailed
from ...runtime.kvschemes import PLAIN_KV, KVScheme
from ...runtime.requests import Failed, Finished, GenerationRequest, SamplingRequest, TextDelta
from ...runtime.settings import Dtype, Settings
from .options import GIB, default_prompt_cache

if TYPE_CHECKING:
    from pathlib import Path

    from ...actors.blocking import BlockingRuntime
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


def settings_for_one(
    model: ResolvedModel,
    dtype: Dtype,
    adapters: tuple[Path, ...] = (),
    kv: KVScheme = PLAIN_KV,
) -> Settings:
    """One row at a time; prompts are kept, so that a chat's next turn starts where it ended."""
    return Settings(
        model=model.path,
        name=model.name,
        batch=1,
        queue=1,
        dtype=dtype,
        kv=kv,
        prompt_cache_bytes=int(default_prompt_cache() * GIB),
        adapters=adapters,
    )


@contextmanager
def open_ready(settings: Settings) -> Iterator[BlockingRuntime]:
    """A runtime whose model is loaded. Raises TroupeErrors, also in groups."""
    from ...actors.blocking import open_blocking_runtime

    with open_blocking_runtime(settings) as runtime:
        runtime.wait_ready()
        yield runtime


def answer(
    runtime: BlockingRuntime, request: GenerationRequest, show: Callable[[TextDelta], None]
) -> Finished:
    """Run one generation to its end. Raises the TroupeError that ended or refused it.

    A KeyboardInterrupt passes through and ends the generation.
    """
    with runtime.generate(request) as generation:
        for event in generation:
            match event:
                case TextDelta():
                    show(event)
                case Finished():
                    return event
                case Failed(error):
                    raise error
                case _:
                    assert_never(event)
    raise GenerationFailed("the answer ended without a word")
