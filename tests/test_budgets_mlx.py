"""Limits on the state of rows, held to what the real device allocates for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
from tiny import make_checkpoint

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.actors.worker import ThreadWorker
from mlx_troupe.runtime.budgets import LONE_STEP
from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.requests import (
    Finished,
    GenerationRequest,
    SamplingRequest,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

pytestmark = pytest.mark.mlx

TOKENS = 1100
"""Of the longest row that the limit leaves room for, about; six rows want to run at a time."""


class Measured(MLXDevice):
    """Remembers the most bytes of rows' state that it had after a step, and the most rows."""

    most_bytes = most_rows = 0

    def stats(self) -> DeviceStats:
        stats = super().stats()
        self.most_bytes = max(self.most_bytes, stats.kv_bytes)
        self.most_rows = max(self.most_rows, stats.rows)
        return stats


async def serve(runtime: Runtime, draw: random.Random, requests: int) -> None:
    """Six clients with prompts and answers of random length; each gets at least one token."""
    todo = [
        (draw.choice((5, 40, 63, 64, 120, 200, 300)), draw.choice((1, 3, 9, 30, 70)))
        for _ in range(requests)
    ]

    async def client() -> None:
        while todo:
            length, answer = todo.pop()
            ids = tuple(draw.randrange(2, 128) for _ in range(length))
            sampling = SamplingRequest(temperature=0.0)
            async with runtime.generate(
                GenerationRequest(TokenPrompt(ids), sampling, answer)
            ) as generation:
                while not isinstance(event := await generation.next_event(), Finished):
                    assert hasattr(event, "text"), event
                assert event.usage.completion_tokens

    async with trio.open_nursery() as clients:
        for _ in range(6):
            clients.start_soon(client)


@pytest.mark.parametrize("family", ["llama", "sliding", "lfm2", "mamba"])
async def test_rows_take_no_more_than_their_limit_on_a_real_device(
    family: str, tmp_path: Path
) -> None:
    """Slots of a batch, rings in prefill and recurrent state are all counted."""
    path = make_checkpoint(tmp_path / family, family)
    probe = MLXDevice(Options(path, name="tiny", dtype="float32"))
    info = probe.open()
    probe.close()
    limit = TOKENS * info.kv_bytes_per_token + 12 * info.fixed_bytes
    device = Measured(Options(path, name="tiny", dtype="float32", batch=6, spare_slots=False))
    settings = Settings(
        path, "tiny", batch=6, queue=12, kv_budget_bytes=limit, prompt_cache_bytes=0
    )
    worker = ThreadWorker(device)
    async with open_runtime(settings, tokenizer=ByteTokenizer(), worker=worker) as runtime:
        await runtime.wait_ready()
        await serve(runtime, random.Random(family), 60)
    assert device.most_rows > 1, "the limit did not leave room for two"
    piecemeal = (LONE_STEP - 1) * info.kv_bytes_per_token
    assert limit / 4 < device.most_bytes <= limit + piecemeal, "see reserve.py for the allowance"
