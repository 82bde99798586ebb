"""Interrupted answers of real tiny models: after any cut they end as one uninterrupted run does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from company import WordTokenizer, settle
from lora_rig import make_mlx_adapter
from resume_rig import interrupted, whole
from tiny import EOS, make_checkpoint, prompt

from mlx_troupe.actors.system import open_runtime
from mlx_troupe.runtime.requests import GenerationRequest, SamplingRequest, TokenPrompt
from mlx_troupe.runtime.settings import Settings

pytestmark = pytest.mark.mlx

TOKENS = 20
CUTS = (1, 2, 7, 12, 15)
SAMPLINGS: dict[str, SamplingRequest] = {
    "greedy": SamplingRequest(temperature=0.0),
    "seeded": SamplingRequest(temperature=1.0, seed=11),
    "penalties": SamplingRequest(
        temperature=1.0,
        seed=12,
        top_p=0.95,
        repetition_penalty=1.3,
        repetition_context_size=8,
        presence_penalty=0.5,
        frequency_penalty=0.4,
        frequency_context_size=0,
        logit_bias=((5, 1.5),),
    ),
    "unseeded": SamplingRequest(temperature=1.0),
}


class TinyTokenizer(WordTokenizer):
    """Words for ids, with the tiny models' own end token."""

    eos_ids = frozenset({EOS})

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


@pytest.mark.parametrize("family", ["llama", "sliding", "mamba"])
async def test_cut_at_every_token(family: str, tmp_path: Path) -> None:
    """Ids and figures are those of one run, with every kind of sampling and of state."""
    settings = Settings(make_checkpoint(tmp_path / "model", family), "tiny", batch=2)
    async with open_runtime(settings, tokenizer=TinyTokenizer()) as runtime:
        await runtime.wait_ready()
        cuts = 0
        for name, sampling in SAMPLINGS.items():
            request = GenerationRequest(
                TokenPrompt(tuple(prompt(21, 3))), sampling, max_tokens=TOKENS, logprobs=2
            )
            for cut in CUTS:
                keyed = replace(request, resume_key=f"{name} {cut}")
                left = await interrupted(runtime, keyed, cut)
                await settle(runtime)
                if not left or not len(runtime.checkpoints):
                    # The answer was over: an end token came.
                    break
                (record,) = runtime.checkpoints._records._kept.values()
                assert cut <= len(record.ids) < TOKENS
                cuts += 1
                again = await whole(runtime, keyed)
                # A run of its own, with the seed that the first try had.
                fixed = replace(request, sampling=replace(sampling, seed=record.seed))
                _equal(again, await whole(runtime, fixed))
        assert cuts >= 2 * len(SAMPLINGS)


async def test_an_adapters_record_is_its_own(tmp_path: Path) -> None:
    """A request without the adapter neither goes on with its record nor removes it."""
    model = make_checkpoint(tmp_path / "model")
    folders = [
        make_mlx_adapter(tmp_path / name, model, seed=seed, keys=("self_attn.q_proj",))
        for seed, name in enumerate("ab", 1)
    ]
    settings = Settings(model, "tiny", batch=2, adapters=tuple(folders))
    async with open_runtime(settings, tokenizer=TinyTokenizer()) as runtime:
        await runtime.wait_ready()
        ask: dict[str, Any] = {"max_tokens": TOKENS, "resume_key": "k", "logprobs": 1}
        base = GenerationRequest(
            TokenPrompt(tuple(prompt(30, 1))), SAMPLINGS["greedy"], adapters=(), **ask
        )
        with_a, with_b = (replace(base, adapters=(name,)) for name in "ab")
        expected = [
            await whole(runtime, replace(r, resume_key=None)) for r in (base, with_a, with_b)
        ]
        assert len({answer.text for answer in expected}) == 3
        assert await interrupted(runtime, with_a, 7)
        await settle(runtime)
        for request, answer in zip((base, with_b), (expected[0], expected[2]), strict=True):
            _equal(await whole(runtime, request), answer)
        assert len(runtime.checkpoints) == 1
        _equal(await whole(runtime, with_a), expected[1])
        assert len(runtime.checkpoints) == 0


def _equal(one: Any, other: Any) -> None:
    assert one.texts == other.texts
    assert [s.chosen.id for s in one.scores] == [s.chosen.id for s in other.scores]
    for mine, theirs in zip(one.scores, other.scores, strict=True):
        assert mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-3)
    assert one.usage.completion_tokens == other.usage.completion_tokens
    assert one.usage.cached_tokens <= one.usage.prompt_tokens == other.usage.prompt_tokens
