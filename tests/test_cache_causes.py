"""Explained misses of chats: text that differs because a template's settings or tools do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import trio
import trio.testing
from company import company, run

from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.grammars import JsonGrammar
from mlx_troupe.runtime.requests import (
    CacheNote,
    ChatPrompt,
    Finished,
    GenerationRequest,
    Message,
    SamplingRequest,
)
from mlx_troupe.runtime.text import renderings
from mlx_troupe.runtime.text.renderings import MOST, Renderings
from mlx_troupe.runtime.text.testing import ByteTokenizer

READ, WRITE = {"name": "read"}, {"name": "write"}


class Template(ByteTokenizer):
    """Tools come first, then the language, then the turns; the last user turn is pointed at."""

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        head = f"tools: {kwargs.get('tools', '-')}\nin {kwargs.get('language', 'English')}\n"
        if kwargs.get("points") and messages:
            last = dict(messages[-1])
            messages = [*messages[:-1], {**last, "content": f"!{last['content']}"}]
        return head + super().render(
            messages, add_generation_prompt=add_generation_prompt, think=kwargs.get("think")
        )


def chat(*texts: str, **settings: object) -> GenerationRequest:
    """A greedy chat whose first and every other turn is the user's."""
    roles = ("user", "assistant")
    messages = tuple(Message(roles[n % 2], text) for n, text in enumerate(texts))
    greedy = SamplingRequest(temperature=0.0)
    return GenerationRequest(ChatPrompt(messages, settings), greedy, max_tokens=3, explain=True)


async def told(runtime: Runtime, request: GenerationRequest) -> CacheNote:
    """What the prompt cache had."""
    _, end = await run(runtime, request)
    assert isinstance(end, Finished)
    assert end.usage.cache is not None
    return end.usage.cache


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ({}, {"language": "French"}, "template"),
        ({}, {"think": True}, "template"),
        ({"tools": [READ, WRITE]}, {"tools": [WRITE, READ]}, "tools_order"),
        ({"tools": [READ, WRITE]}, {"tools": [READ]}, "tools"),
        ({"tools": [READ]}, {}, "tools"),
        ({"tools": [READ]}, {"tools": [READ], "language": "French"}, "template"),
        ({"tools": [READ]}, {"tools": [WRITE], "language": "French"}, "tools"),
    ],
)
@pytest.mark.parametrize("same", [True, False], ids=["same question", "another question"])
async def test_what_is_rendered_otherwise_is_named(
    before: Mapping[str, object],
    after: Mapping[str, object],
    reason: str,
    same: bool,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Settings and tools, but only where the prompts part because of them."""
    async with company(tokenizer=Template()) as (runtime, _):
        await told(runtime, chat("hello", **before))
        seen = await told(runtime, chat("hello" if same else "hullo", **after))
        if "think" in after and not same:
            reason = "text"
        assert seen.reason == reason


async def test_another_question_under_other_settings_is_another_text(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What a setting changes further on is no reason for parting here."""
    async with company(tokenizer=Template()) as (runtime, _):
        await told(runtime, chat("what is a shell?", think=True))
        seen = await told(runtime, chat("what is a ship?", think=False))
        assert (seen.reason, seen.before[-3:], seen.after[:2]) == ("text", " sh", "ip")


async def test_a_template_that_shows_earlier_turns_otherwise_is_named(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The same messages and more, under the same settings, in other words; an edit is an edit."""
    async with company(tokenizer=Template()) as (runtime, _):
        await told(runtime, chat("hello", points=True))
        assert (await told(runtime, chat("hello", "hi", "bye", points=True))).reason == "template"
    async with company(tokenizer=Template()) as (runtime, _):
        await told(runtime, chat("hello"))
        assert (await told(runtime, chat("hallo", "hi", "bye"))).reason == "text"


async def test_a_format_asked_for_in_words_is_another_text() -> None:
    """The instruction is a message that the next turn has not, or has; no setting of a template."""
    beyond = JsonGrammar('{"type": "array", "uniqueItems": true}')
    for first, second in ((beyond, None), (None, beyond)):
        device = ScriptedDevice(decode_seconds=0.0, prefill_token_seconds=0.0)
        async with company(device, tokenizer=Template()) as (runtime, _):
            await told(runtime, replace(chat("hello"), grammar=first))
            seen = await told(runtime, replace(chat("hello", "hi", "bye"), grammar=second))
            assert seen.reason == "text"


async def test_the_order_of_an_objects_keys_is_told_as_other_tools(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Templates write objects as they come."""
    async with company(tokenizer=Template()) as (runtime, _):
        await told(runtime, chat("hello", tools=[{"name": "a", "kind": "b"}]))
        seen = await told(runtime, chat("hello", tools=[{"kind": "b", "name": "a"}]))
        assert seen.reason == "tools"


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones, and less of them where they are long."""
    known = Renderings()
    prompt = ChatPrompt((Message("user", "x"),))
    for number in range(3 * MOST):
        known.note((1, 2, number), prompt)
    assert len(known) == MOST
    assert len(list(known.parting_at((1, 2, 999_999), 2))) == 4
    assert list(known.parting_at((1, 9), 2)) == []
    monkeypatch.setattr(renderings, "MOST_BYTES", 1000)
    known.note(range(100), prompt)
    assert 1 <= len(known) < 10
