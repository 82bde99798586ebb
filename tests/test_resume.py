"""Interrupted answers on virtual time: the same request goes on, and says what one run would."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from company import ask, company, run, settle
from hypothesis import given
from hypothesis import strategies as st
from resume_rig import interrupted, whole

from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.grammars import ChoiceGrammar, Grammar, JsonGrammar
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import TokenLogprobs
from mlx_troupe.runtime.requests import (
    ChatPrompt,
    Finished,
    GenerationRequest,
    Message,
    Sampling,
    SamplingRequest,
    StreamTicket,
    TextPrompt,
    TokenPrompt,
)
from mlx_troupe.runtime.resume.identity import Asked, identity_of
from mlx_troupe.runtime.resume.records import Record, Records
from mlx_troupe.runtime.resume.replays import replay_of
from mlx_troupe.runtime.text.testing import END_THINK, EOS, THINK, ByteTokenizer

BYTES = ModelInfo("scripted", 300, 4096, frozenset({EOS}), namespace="s")
RECURRENT = ModelInfo("scripted", 1000, 4096, frozenset({0}), trim_window=0, namespace="r")
SCHEMA = JsonGrammar(
    json.dumps(
        {"type": "object", "properties": {"a": {"enum": ["xy", "zw"]}}, "required": ["a"]}
        | {"additionalProperties": False}
    ),
    any_whitespace=False,
)


def said(text: str) -> Any:
    """A script that spells a text in bytes."""
    return spelled([*text.encode(), EOS])


def spelled(ids: list[int]) -> Any:
    """A script that says these ids after the prompt of the first row, and of rows like it."""
    lengths: list[int] = []

    def script(row: tuple[int, ...]) -> int:
        if not lengths:
            lengths.append(len(row))
        return ids[(len(row) - lengths[0]) % len(ids)]

    return script


def babble(ids: tuple[int, ...]) -> int:
    """A token that depends on the whole row, never an end."""
    return (sum(ids) * 31 + len(ids) * 17 + ids[-1] * 5) % 250 + 1


PROMPT = TextPrompt("Say something, please.")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (babble, {"prompt": TokenPrompt((5, 6, 7))}),
    "one token": (babble, {"prompt": TokenPrompt((5,))}),
    "logprobs": (babble, {"prompt": PROMPT, "logprobs": 3}),
    "characters of several bytes": (said("né ä 漢字 😀 and so on"), {"prompt": PROMPT}),
    "stop string over the cut": (said("one two STOP three"), {"prompt": PROMPT, "stop": ("STOP",)}),
    "a stop string that never comes": (said("one STO two"), {"prompt": PROMPT, "stop": ("STOP",)}),
    "an end token": (said("done."), {"prompt": PROMPT}),
    "the limit": (babble, {"prompt": PROMPT, "max_tokens": 4}),
}


def keyed(**more: Any) -> GenerationRequest:
    """A greedy request with a resume key."""
    asked = {"max_tokens": 24, "resume_key": "k", **more}
    return GenerationRequest(sampling=SamplingRequest(temperature=0.0), **asked)


@pytest.mark.parametrize("model", [BYTES, replace(BYTES, trim_window=0)], ids=["plain", "whole"])
@pytest.mark.parametrize("cache", [1 << 20, 0], ids=["cache", "no cache"])
@pytest.mark.parametrize("case", CASES)
async def test_cut_at_every_event(
    case: str, cache: int, model: ModelInfo, autojump_clock: trio.testing.MockClock
) -> None:
    """Text, figures, reason and usage are those of one run, and nothing is computed twice."""
    script, asked = CASES[case]
    request = keyed(**asked)
    async with company(
        ScriptedDevice(model, script), tokenizer=ByteTokenizer(), prompt_cache_bytes=cache
    ) as (runtime, device):
        expected = await whole(runtime, request)
        assert await runtime.clear_cache() >= 0
        for events in range(1, 30):
            plain = replace(request, resume_key=f"cut after {events}")
            if not await interrupted(runtime, plain, events):
                break
            await settle(runtime)
            made = sum(len(plan.decode) for plan in device.plans)
            was_over = not len(runtime.checkpoints)
            again = await whole(runtime, plain)
            again.same_as(expected)
            await settle(runtime)
            decodes = sum(len(plan.decode) for plan in device.plans) - made
            # A row that ends by its text does so some steps late.
            assert was_over or decodes <= expected.usage.completion_tokens - events + 4
        assert events > 1


@pytest.mark.parametrize("grammar", [SCHEMA, ChoiceGrammar(("abcdefgh", "abcdwxyz"))])
async def test_cut_at_every_event_of_a_grammar(grammar: Grammar) -> None:
    """The matcher has followed what is replayed, and leads on from there."""
    # On the real clock: grammars are compiled on a thread.
    device = ScriptedDevice(BYTES, babble, decode_seconds=0.001, prefill_token_seconds=0.0)
    async with company(device, tokenizer=ByteTokenizer()) as (runtime, _):
        request = keyed(prompt=PROMPT, grammar=grammar)
        expected = await whole(runtime, request)
        assert expected.reason == "stop"
        replayed = 0
        for events in range(1, 12):
            again = replace(request, resume_key=f"cut after {events}")
            if not await interrupted(runtime, again, events):
                break
            replayed += len(runtime.checkpoints)
            (await whole(runtime, again)).same_as(expected)
        assert replayed > 3


async def test_cut_again_and_again(autojump_clock: trio.testing.MockClock) -> None:
    """An answer that is interrupted after each token comes to its end like any other."""
    request = keyed(prompt=TokenPrompt((5, 6, 7)), max_tokens=12, logprobs=1)
    async with company(ScriptedDevice(script=babble)) as (runtime, _):
        expected = await whole(runtime, replace(request, resume_key="other"))
        for events in range(1, 13):
            if not await interrupted(runtime, request, events):
                break
            await settle(runtime)
        (await whole(runtime, request)).same_as(expected)


async def test_cached_tokens_are_the_prompts_alone(autojump_clock: trio.testing.MockClock) -> None:
    """What is replayed does not count as cached, whatever was kept of it."""
    prompt = tuple(range(1, 41))
    async with company(ScriptedDevice(script=babble)) as (runtime, _):
        request = keyed(prompt=TokenPrompt(prompt), max_tokens=40)
        assert await interrupted(runtime, request, 30)
        await settle(runtime)
        answer = await whole(runtime, request)
        assert answer.usage.cached_tokens == answer.usage.prompt_tokens == 40
        assert answer.usage.completion_tokens == 40


async def test_completion_removes_and_cancellation_keeps(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After the end there is no record; before it there is one, a failed try's too."""
    async with company(ScriptedDevice(script=babble)) as (runtime, device):
        request = keyed(prompt=TokenPrompt((5, 6, 7)))
        assert await interrupted(runtime, request, 3)
        assert len(runtime.checkpoints) == 1
        await whole(runtime, request)
        assert len(runtime.checkpoints) == 0
        await settle(runtime)
        decodes = sum(len(plan.decode) for plan in device.plans)
        await whole(runtime, request)
        again = sum(len(plan.decode) for plan in device.plans) - decodes
        assert again == 24, "a finished answer was replayed"


async def test_nothing_is_replayed_without_being_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A request without a key is computed anew, greedy or not."""
    async with company(ScriptedDevice(script=babble)) as (runtime, _):
        request = replace(keyed(prompt=TokenPrompt((5, 6, 7))), resume_key=None)
        assert await interrupted(runtime, request, 3)
        assert len(runtime.checkpoints) == 0
        _, end = await run(runtime, ask(1, 2, 3))
        assert isinstance(end, Finished)


ASKED = Asked((1, 2, 3), Sampling(temperature=1.0, seed=5), 10, None, "model", ())
SEEDED = GenerationRequest(TokenPrompt((1, 2, 3)), SamplingRequest(seed=5, temperature=1.0))
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt": ({}, {"prompt": (1, 2, 4)}),
    "a shorter prompt": ({}, {"prompt": (1, 2)}),
    "temperature": ({}, {"sampling": Sampling(temperature=0.9, seed=5)}),
    "penalty": ({}, {"sampling": Sampling(temperature=1.0, seed=5, presence_penalty=0.5)}),
    "bias": ({}, {"sampling": Sampling(temperature=1.0, seed=5, logit_bias=((1, 2.0),))}),
    "seed": ({"sampling": SamplingRequest(seed=6, temperature=1.0)}, {}),
    "limit": ({}, {"limit": 11}),
    "stop": ({"stop": ("x",)}, {}),
    "order of stops": ({"stop": ("x", "y")}, {}),
    "stop ids": ({"stop_token_ids": (9,)}, {}),
    "grammar": ({"grammar": ChoiceGrammar(("a",))}, {}),
    "another grammar": ({"grammar": ChoiceGrammar(("b",))}, {}),
    "logprobs": ({"logprobs": 0}, {}),
    "more logprobs": ({"logprobs": 2}, {}),
    "reasoning": ({}, {"reasoning": ("<think>", "</think>", False)}),
    "open reasoning": ({}, {"reasoning": ("<think>", "</think>", True)}),
    "model": ({}, {"namespace": "other"}),
    "adapter": ({}, {"adapters": ("r1",)}),
    "another adapter": ({}, {"adapters": ("r2",)}),
    "two adapters": ({}, {"adapters": ("r1", "r2")}),
    "their order": ({}, {"adapters": ("r2", "r1")}),
    "key": ({"resume_key": "k"}, {}),
}


def test_every_difference_makes_another_request() -> None:
    """No two of these share an identity, and an equal request has the same one."""
    identities = {"none": identity_of(SEEDED, ASKED)}
    for name, (request, asked) in DIFFERENCES.items():
        identities[name] = identity_of(replace(SEEDED, **request), replace(ASKED, **asked))
    assert None not in identities.values()
    assert len(set(identities.values())) == len(identities)
    assert identity_of(replace(SEEDED), replace(ASKED)) == identities["none"]


def test_an_identity_outlives_the_process() -> None:
    """It is a digest of values: written out here, so that no release changes it by accident."""
    expected = "0a72584205396ace47e90c1663b5b152f9f231a49ca9bfaac7a15720c03c8f86"
    assert identity_of(SEEDED, ASKED) == expected


def test_regenerate_is_another_answer() -> None:
    """Sampling without a seed has no identity unless the client names the answer."""
    unseeded = replace(SEEDED, sampling=SamplingRequest(temperature=1.0))
    assert identity_of(unseeded, ASKED) is None
    named = replace(unseeded, resume_key="k")
    streamed = replace(unseeded, ticket=StreamTicket("k"))
    other = replace(ASKED, sampling=replace(ASKED.sampling, seed=77))
    assert identity_of(named, ASKED) == identity_of(named, other)
    assert len({identity_of(x, ASKED) for x in (named, streamed, SEEDED)}) == 3
    assert identity_of(replace(SEEDED, ticket=StreamTicket("k")), ASKED) == identity_of(
        SEEDED, ASKED
    )


def test_greedy_requests_need_no_seed() -> None:
    """Nothing is drawn, so the seed is no part of the request."""
    greedy = replace(SEEDED, sampling=SamplingRequest(temperature=0.0))
    one, other = (replace(ASKED, sampling=Sampling(seed=seed)) for seed in (1, 2))
    assert identity_of(greedy, one) == identity_of(greedy, other) is not None


def test_a_token_that_ends_is_made_anew() -> None:
    """A replay stops before an end token, and before the limit."""
    record = Record("i", 0, (7, 8, 9, 10))
    assert _replayed(record, limit=10) == (7, 8, 9, 10)
    assert _replayed(record, limit=4) == (7, 8, 9)
    assert _replayed(record, limit=10, end_ids={9}) == (7, 8)
    assert _replayed(record, limit=1) is None
    assert _replayed(record, limit=10, end_ids={7}) is None


def _replayed(record: Record, *, limit: int, end_ids: set[int] | None = None) -> Any:
    replay = replay_of(record, limit=limit, end_ids=end_ids or set(), adapters=(), matcher=None)
    return None if replay is None else replay.ids


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 3), st.booleans()),
        max_size=60,
    )
)
def test_records_stay_within_their_budget(steps: list[tuple[str, int, int, bool]]) -> None:
    """The longest try of a request is found, the budget holds, and nothing is counted twice."""
    records = Records(6000)
    longest: dict[str, int] = {}
    for identity, count, top, removes in steps:
        if removes:
            records.remove(identity)
            longest.pop(identity, None)
        else:
            figures = (TokenLogprobs(-1.0, ((1, -1.0),) * top),) * count if top else ()
            records.keep(Record(identity, 0, tuple(range(count)), figures))
            longest[identity] = max(longest.get(identity, 0), count)
        assert records.nbytes <= 6000
        held = {i: r for i in "abcdef" if (r := records.find(i)) is not None}
        assert len(held) == len(records)
        assert records.nbytes == sum(r.nbytes for r in held.values())
        assert all(len(r.ids) <= longest[i] for i, r in held.items())


async def test_reasoning_is_replayed_as_reasoning(autojump_clock: trio.testing.MockClock) -> None:
    """The splitter is fed again from the first token: no thought becomes content."""
    script = spelled([THINK, *b"hm, hm", END_THINK, *b"well: yes", EOS])
    prompt = ChatPrompt((Message("user", "Think."),))
    tokenizer = ByteTokenizer(thinks=True)
    async with company(ScriptedDevice(BYTES, script), tokenizer=tokenizer) as (runtime, _):
        request = keyed(prompt=prompt, max_tokens=40)
        expected = await whole(runtime, request)
        assert len(expected.texts) == 2
        for events in range(1, 16):
            keyed_again = replace(request, resume_key=f"{events}")
            if not await interrupted(runtime, keyed_again, events):
                break
            (await whole(runtime, keyed_again)).same_as(expected)
        assert events > 8
