"""The whole cast on the scripted device and trio's virtual clock."""

from __future__ import annotations

import pytest
import trio
from company import SETTINGS, ask, company, read, run, settle

from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.device import ModelInfo
from mlx_troupe.runtime.errors import ContextLengthExceeded, Overloaded
from mlx_troupe.runtime.requests import Failed, Finished, FinishReason


async def test_one_request_runs_from_prompt_to_finish(autojump_clock: object) -> None:
    """A prompt goes in, text and a Finished with the right counts come out."""
    async with company() as (runtime, _):
        text, end = await run(runtime, ask(1, 2, 3))
    assert text == " 4 5 6 7 8"
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 5)
    assert end.usage.lane == "batched"
