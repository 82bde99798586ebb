"""Chats that grow: in every layout each turn starts from the one before."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from company import WordTokenizer, ask, run
from kv_rig import CONFIG
from tiny import make_checkpoint, prompt
from tiny_hybrids import HYBRIDS

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme, PerLayerKV, TurboKV
from mlx_troupe.runtime.requests import Finished
from mlx_troupe.runtime.settings import Settings

pytestmark = pytest.mark.mlx

WIDE: dict[str, Any] = {"head_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", WIDE),
    "sliding": ("sliding", {**WIDE, "sliding_window": 16}),
    "recurrent": ("mamba2", {}),
    "hybrid": ("lfm2", {}),
    "lists": ("llama", {**HYBRIDS["falcon_h1"], "model_type": "falcon_h1"}),
}
LAYOUTS: list[tuple[str, KVScheme]] = [
    ("plain", PLAIN_KV),
    ("plain", AffineKV(8, start=40)),
    ("plain", PerLayerKV()),
    ("plain", TurboKV()),
    ("sliding", PLAIN_KV),
    ("sliding", AffineKV(8)),
    ("recurrent", PLAIN_KV),
    ("hybrid", PLAIN_KV),
    ("lists", PLAIN_KV),
]
TURNS = 4
ANSWER = 6
NEWS = 20


@cache
def folder(name: str) -> Path:
    """One of ``MODELS`` as a checkpoint."""
    family, config = MODELS[name]
    path = make_checkpoint(Path(tempfile.mkdtemp(prefix="chat")) / "m", family, **config)
    (path / "kv_config.json").write_text(CONFIG)
    return path


async def turn(runtime: Runtime, ids: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """The answer's ids, how much of the prompt was there already, and what is there afterwards.

    The last token of an answer was never processed; an end token is not in its text.
    """
    text, end = await run(runtime, ask(*ids, max_tokens=ANSWER))
    assert isinstance(end, Finished)
    left = end.usage.prompt_tokens + end.usage.completion_tokens - 1
    return tuple(map(int, text.split())), end.usage.cached_tokens, left


@pytest.mark.parametrize(("name", "kv"), LAYOUTS, ids=str)
async def test_each_turn_starts_where_the_last_one_ended(name: str, kv: KVScheme) -> None:
    """All that the last turn processed is there; plain layouts say what a cold run says."""
    settings = Settings(folder(name), "tiny", batch=2, queue=4, dtype="float32", kv=kv)
    asked: list[tuple[int, ...]] = []
    said: list[tuple[int, ...]] = []
    ids, goal = prompt(30), 0
    async with open_runtime(settings, tokenizer=WordTokenizer()) as runtime:
        await runtime.wait_ready()
        for number in range(TURNS):
            answer, cached, left = await turn(runtime, ids)
            assert cached == goal, f"turn {number} starts from {cached} tokens of {goal}"
            asked.append(ids)
            said.append(answer)
            ids, goal = (*ids, *answer, *prompt(NEWS, 10 + number)), left
    if kv != PLAIN_KV:
        # A cold prompt is computed on plain keys and values and encoded behind them; one that goes
        # on from a kept state reads what was encoded: near, and not the same.
        return
    cold = Settings(
        folder(name), "tiny", batch=2, queue=4, dtype="float32", kv=kv, prompt_cache_bytes=0
    )
    async with open_runtime(cold, tokenizer=WordTokenizer()) as runtime:
        await runtime.wait_ready()
        for ids, answer in zip(asked, said, strict=True):
            assert (await turn(runtime, ids))[:2] == (answer, 0)
