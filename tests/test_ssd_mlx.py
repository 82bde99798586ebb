"""The SSD tier with real states: a runtime is stopped, another one goes on from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composition_values import HEADS, KV
from tiny import make_checkpoint, prompt

from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.runtime.requests import (
    Finished,
    GenerationRequest,
    SamplingRequest,
    ScoredToken,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings
from mlx_troupe.runtime.text.testing import ByteTokenizer

pytestmark = pytest.mark.mlx

TOKENS = 8
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("llama", "plain", {}),
    "sliding": ("sliding", "plain", {}),
    "recurrent": ("mamba", "plain", {}),
    "hybrid": ("lfm2", "plain", {}),
    "affine": ("llama", "affine 8", HEADS),
    "turbo": ("llama", "turbo k8v3", HEADS),
}


async def answer(runtime: Runtime, ids: tuple[int, ...]) -> tuple[list[ScoredToken], int]:
    """Greedy tokens with their log-probabilities, and how much of the prompt was cached."""
    request = GenerationRequest(
        TokenPrompt(ids), SamplingRequest(temperature=0.0), max_tokens=TOKENS, logprobs=5
    )
    scores: list[ScoredToken] = []
    async with runtime.generate(request) as generation:
        while True:
            event = await generation.next_event()
            assert isinstance(event, TextDelta | Finished), event
            scores += event.scores
            if isinstance(event, Finished):
                return scores, event.usage.cached_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_state_from_the_disk_goes_on_as_one_from_memory(
    tmp_path: Path, layout: str
) -> None:
    """The same tokens and, to the last bit, the same figures; all but one token is cached."""
    family, scheme, config = LAYOUTS[layout]
    model = make_checkpoint(tmp_path / "model", family, **config)
    settings = Settings(model, "tiny", dtype="float32", kv=KV[scheme], ssd_cache=tmp_path / "cache")
    prompts = [prompt(length, length) for length in (257, 300, 513)]
    memory = {}
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        for ids in prompts:
            cold, cached = await answer(runtime, ids)
            assert cached == 0
            memory[ids], cached = await answer(runtime, ids)
            assert cached == len(ids) - 1
            assert [s.chosen.id for s in cold] == [s.chosen.id for s in memory[ids]]
            for one, other in zip(cold, memory[ids], strict=True):
                assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
        report = await runtime.flush_cache(30)
        assert report.durable, report
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        for ids in prompts:
            restored, cached = await answer(runtime, ids)
            assert cached == len(ids) - 1
            assert restored == memory[ids]
        stats: Any = runtime.stats()["ssd_cache"]
        assert stats["restores"] == len(prompts)
        assert stats["faults"] == 0


async def test_a_paged_server_goes_past_the_disk(tmp_path: Path) -> None:
    """Nothing is kept, so nothing is written, and no folder is made."""
    model = make_checkpoint(tmp_path / "model", "llama")
    folder = tmp_path / "cache"
    settings = Settings(model, "tiny", dtype="float32", kv=KV["paged"], ssd_cache=folder)
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await answer(runtime, prompt(300))
        assert "ssd_cache" not in runtime.stats()
    assert not folder.exists()


async def test_a_file_of_another_model_is_a_miss(tmp_path: Path) -> None:
    """Two models share a folder and find only their own."""
    folder = tmp_path / "cache"
    ids = prompt(300)
    told: dict[int, list[int]] = {}
    models = [make_checkpoint(tmp_path / f"model{seed}", "llama", seed) for seed in (0, 1)]
    for seed in (0, 1, 0):
        settings = Settings(models[seed], "tiny", dtype="float32", ssd_cache=folder)
        async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
            scores, cached = await answer(runtime, ids)
            assert (cached > 0) == (seed in told)
            told.setdefault(seed, [score.chosen.id for score in scores])
            assert [score.chosen.id for score in scores] == told[seed]
            assert (await runtime.flush_cache(30)).durable
    assert told[0] != told[1]
