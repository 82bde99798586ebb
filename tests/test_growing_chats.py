"""Chats that grow: in every layout each turn starts from the one before."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from company import WordTokenizer, ask, run
from kv_rig import CONFIG
from tiny import make_checkpoint, prompt
from tiny_hybrids import HYBRIDS

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme, PerLayerKV, TurboKV
from mlx_troupe.runtime.requests import (
    ChatPrompt,
    Finished,
    GenerationRequest,
    Message,
    SamplingRequest,
    Usage,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

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
WORDS = tuple(f"{a}{b}" for a in "abcdef" for b in "ghijkl")
LETTERS = 30


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


async def say(
    runtime: Runtime, *turns: tuple[Literal["user", "assistant"], str]
) -> tuple[str, Usage]:
    """What the model says next in a chat, of letters and words only."""
    free = (*range(97, 123), *range(259, 259 + len(WORDS)))
    bias = tuple((i, -100.0) for i in range(259 + len(WORDS)) if i not in free)
    sampling = SamplingRequest(temperature=0.0, logit_bias=bias)
    messages = tuple(Message(role, text) for role, text in turns)
    text, end = await run(
        runtime, GenerationRequest(ChatPrompt(messages), sampling, max_tokens=LETTERS)
    )
    assert isinstance(end, Finished)
    return text, end.usage


async def test_an_answer_that_is_encoded_otherwise_is_found_by_the_ids_that_were_made(
    tmp_path: Path,
) -> None:
    """The client sends text: while it is the same, the ids are; edited it is text like any other.

    (PC-11.) The tokenizer spells what the model said in more tokens than the model did.
    """
    tokenizer = ByteTokenizer(WORDS)
    folder = make_checkpoint(tmp_path, "llama", vocab_size=tokenizer.vocab_size)
    async with open_runtime(Settings(folder, "tiny"), tokenizer=tokenizer) as runtime:
        text, first = await say(runtime, ("user", "hello"))
        assert first.completion_tokens == LETTERS
        assert len(tokenizer.encode(text, add_special_tokens=False)) > LETTERS
        chat: tuple[Literal["user", "assistant"], str] = ("user", "hello")
        _, same = await say(runtime, chat, ("assistant", text), ("user", "go on"))
        assert same.cached_tokens == first.prompt_tokens + LETTERS - 1
        _, edited = await say(runtime, chat, ("assistant", f"{text}z"), ("user", "go on"))
        assert first.prompt_tokens <= edited.cached_tokens < first.prompt_tokens + LETTERS - 1
        assert edited.prompt_tokens > same.prompt_tokens + 1
