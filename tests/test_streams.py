"""Streams that a client comes back to: exactly the missing tail, wherever the cut was."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import company as company_module
import httpx
import openai
import pytest
import trio
import trio.testing
from company import company, settle, until
from hypothesis import given
from hypothesis import strategies as st
from resume_rig import whole

from mlx_troupe.actors import request as request_actor
from mlx_troupe.actors.device_messages import WorkerEvent
from mlx_troupe.actors.inline_worker import InlineWorker
from mlx_troupe.actors.outbox import Outbox
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import serving
from mlx_troupe.http.wire.resuming import Cursor, Position
from mlx_troupe.runtime.errors import InvalidRequest, UnknownStream
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.requests import (
    Channel,
    Failed,
    GenerationRequest,
    SamplingRequest,
    StreamTicket,
    TextDelta,
    TokenPrompt,
)
from mlx_troupe.runtime.text.testing import END_THINK, EOS, THINK, ByteTokenizer

MODEL = ModelInfo("scripted", 300, 4096, frozenset({EOS}), namespace="s")
SAYS = (THINK, *"hm ä".encode(), END_THINK, *"né 漢 😀 so".encode(), EOS)
USER = {"role": "user", "content": "Say."}
LENGTH = len(b"user: Say.") + 1 + len(b"\nassistant: ")
CHAT: dict[str, Any] = {
    "messages": [USER],
    "temperature": 0,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 1,
    "stream_options": {"include_usage": True},
}
TEXT: dict[str, Any] = {
    "prompt": list(range(1, LENGTH + 1)),
    "temperature": 0,
    "stream": True,
    "logprobs": 1,
    "stream_options": {"include_usage": True},
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@dataclass
class Seen:
    """What a client has put together from one or more connections."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    done: bool = False

    @property
    def last(self) -> str | None:
        """The id of the last event that was read."""
        return self.events[-1][0] if self.events else None

    def put_together(self) -> dict[str, Any]:
        """The answer, without regard to how it was cut into events."""
        answer: dict[str, Any] = {"scores": [], "offsets": [], "ends": [], "usage": [], "roles": 0}
        for _, chunk in self.events:
            answer.setdefault("id", chunk["id"])
            assert answer["id"] == chunk["id"]
            if chunk.get("usage"):
                answer["usage"].append({**chunk["usage"], "prompt_tokens_details": None})
            for choice in chunk["choices"]:
                delta = choice.get("delta", {"content": choice.get("text", "")})
                answer["roles"] += "role" in delta
                for name in ("content", "reasoning"):
                    answer[name] = answer.get(name, "") + delta.get(name, "")
                told = choice.get("logprobs") or {}
                answer["scores"] += told.get("content", told.get("token_logprobs", []))
                answer["offsets"] += told.get("text_offset", [])
                answer["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        return answer


async def read(
    client: httpx.Client, path: str, seen: Seen, most: int, **more: Any
) -> httpx.Response:
    """Connect, with what was seen before, and read up to ``most`` events."""
    return await trio.to_thread.run_sync(lambda: read_here(client, path, seen, most, more))


def read_here(
    client: httpx.Client, path: str, seen: Seen, most: int, more: dict[str, Any]
) -> httpx.Response:
    """The same, on a thread of its own."""
    headers = {} if seen.last is None else {"Last-Event-ID": seen.last}
    with client.stream("POST", path, json=BODIES[path] | more, headers=headers) as reply:
        if reply.status_code != 200:
            reply.read()
            return reply
        for block in blocks(reply.iter_lines()):
            if block == {"data": "[DONE]"}:
                seen.done = True
                break
            seen.events.append((block["id"], json.loads(block["data"])))
            most -= 1
            if not most:
                break
    return reply


def blocks(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """The events of a reply, as fields."""
    block: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            block[name] = value
        elif block:
            yield block
            block = {}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[httpx.Client, Runtime]]:
    """A client in front of a company that thinks and then speaks."""

    def script(ids: tuple[int, ...]) -> int:
        return SAYS[min(len(ids) - LENGTH, len(SAYS) - 1)]

    device = ScriptedDevice(MODEL, script, decode_seconds=0.002, prefill_token_seconds=0.0)
    tokenizer = ByteTokenizer(thinks=True)
    async with (
        company(device, tokenizer=tokenizer, **settings) as (runtime, _),
        serving(create_app(runtime, HttpSettings(port=0))) as url,
    ):
        with httpx.Client(base_url=url, timeout=20) as client:
            yield client, runtime


def assert_same_answer(one: Seen, other: Seen) -> None:
    """Two requests were answered alike, under ids of their own."""
    first, second = one.put_together(), other.put_together()
    assert first.pop("id") != second.pop("id")
    assert first == second


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("grace", [30.0, 0.0], ids=["running row", "record"])
async def test_cut_at_every_event(path: str, grace: float) -> None:
    """Text, figures, offsets, reason and usage come once each, whatever the reader had read."""
    async with served(stream_grace=grace) as (client, runtime):
        straight = Seen()
        await read(client, path, straight, 0, request_id="straight")
        expected = straight.put_together()
        assert straight.done
        assert expected["content"]
        assert len(expected["ends"]) == len(expected["usage"]) == 1
        expected.pop("id")
        for cut in range(1, len(straight.events) + 1):
            seen = Seen()
            ended = runtime.cast.scheduler.core.stats().finished
            await read(client, path, seen, cut, request_id=f"cut-{cut}")
            if not grace:
                # The record is there when the server has noticed that the client left.
                await settle(runtime)
            reply = await read(client, path, seen, 0, request_id=f"cut-{cut}")
            if reply.status_code == 404:
                # Over before the client left, so that there is no record: only without grace.
                assert not grace
                assert runtime.cast.scheduler.core.stats().finished > ended
                break
            assert reply.headers["X-Stream-Resumed"] == "true"
            again = seen.put_together()
            again.pop("id")
            assert again == expected
            assert seen.done


class HeldWorker(InlineWorker):
    """A device whose results are on their way as long as its ``gate`` is closed."""

    def __init__(self, device: ScriptedDevice) -> None:
        super().__init__(device)
        self.gate = trio.Event()
        self.gate.set()

    async def receive(self) -> WorkerEvent:
        event = await super().receive()
        await self.gate.wait()
        return event


@pytest.mark.parametrize("grace", [30.0, 0.0], ids=["running row", "nothing left"])
async def test_cut_before_the_first_token(grace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read the opening alone is sent the rest, of the running row or of a new one."""
    workers: list[HeldWorker] = []

    def held(device: ScriptedDevice) -> HeldWorker:
        workers.append(HeldWorker(device))
        return workers[-1]

    monkeypatch.setattr(company_module, "InlineWorker", held)
    path = "/v1/chat/completions"
    async with served(stream_grace=grace) as (client, runtime):
        straight, seen = Seen(), Seen()
        await read(client, path, straight, 0, request_id="straight")
        await settle(runtime)
        workers[0].gate = trio.Event()
        await read(client, path, seen, 1, request_id="cut")
        assert seen.put_together()["roles"] == 1
        # The server knows of the cut, and no token has come.
        await until(lambda: runtime._streams.left if grace else not len(runtime._streams))
        assert runtime.cast.scheduler.core.stats().generated_tokens == len(SAYS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(read, client, path, seen, 0, request_id="cut"))
            await until(lambda: len(runtime._streams) > runtime._streams.left)
            workers[0].gate.set()
        assert seen.done
        assert_same_answer(straight, seen)


async def test_one_event_at_a_time() -> None:
    """A client that is cut after each event has the whole answer in the end."""
    async with served() as (client, _):
        path = "/v1/chat/completions"
        straight, seen = Seen(), Seen()
        await read(client, path, straight, 0, request_id="straight")
        for _ in range(100):
            await read(client, path, seen, 1, request_id="pieces")
            if seen.done:
                break
        assert seen.done
        assert_same_answer(straight, seen)


async def test_a_stream_that_is_not_held_goes_on_from_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer longer than what is retained is made again up to where it was, to the letter."""
    monkeypatch.setattr(request_actor, "RETAINED_BYTES", 900)
    async with served() as (client, _):
        path = "/v1/chat/completions"
        straight, seen = Seen(), Seen()
        await read(client, path, straight, 0, request_id="straight")
        await read(client, path, seen, len(straight.events) // 2, request_id="long")
        await read(client, path, seen, 0, request_id="long")
        assert_same_answer(straight, seen)


async def test_unknown_streams() -> None:
    """A 404 names the stream; with ``restart`` the answer comes from its beginning."""
    async with served() as (client, _):
        path = "/v1/chat/completions"
        lost = Seen([("4-0-0", {})])
        reply = await read(client, path, lost, 0, request_id="lost")
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_stream"
        assert reply.json()["error"]["param"] == "request_id"
        lost = Seen([("4-0-0", {})])
        reply = await read(client, path, lost, 0, request_id="lost", restart=True)
        assert reply.headers["X-Stream-Resumed"] == "false"
        lost.events.pop(0)
        assert lost.put_together()["roles"] == 1
        assert lost.put_together()["reasoning"] == "hm ä"


@pytest.mark.parametrize(
    ("headers", "more"),
    [
        ({"Last-Event-ID": "4-0-0"}, {}),
        ({"Last-Event-ID": "four"}, {"request_id": "x"}),
        ({"Last-Event-ID": "4-0-3"}, {"request_id": "x", "restart": True}),
        ({}, {"request_id": "two words"}),
        ({}, {"request_id": ""}),
        ({}, {"request_id": "x" * 129}),
        ({"X-Stream-Id": "x" * 129}, {}),
    ],
)
async def test_what_is_no_return(headers: dict[str, str], more: dict[str, Any]) -> None:
    """An id without a stream, or one that no event had, is a 400 before anything is started."""
    async with served() as (client, runtime):
        reply = await trio.to_thread.run_sync(
            lambda: client.post("/v1/chat/completions", json=CHAT | more, headers=headers)
        )
        assert reply.status_code == 400
        assert runtime.stats()["requests"] == {"active": 0}


async def test_a_name_belongs_to_one_request_at_a_time() -> None:
    """Another body under the name of a stream that runs is refused; after its end it is not."""
    async with served() as (client, runtime):
        path = "/v1/chat/completions"
        seen = Seen()
        await read(client, path, seen, 2, request_id="name")
        other = await read(client, path, Seen(), 0, request_id="name", top_logprobs=0)
        assert other.status_code == 400
        assert other.json()["error"]["param"] == "request_id"
        await settle(runtime)
        other = await read(client, path, Seen(), 0, request_id="name", top_logprobs=0)
        assert other.status_code == 200


async def test_without_a_name_nothing_changes() -> None:
    """No ids, no headers; the official client reads streams with a name like any other."""
    async with served() as (client, _):
        reply = await trio.to_thread.run_sync(
            lambda: client.post("/v1/chat/completions", json=CHAT)
        )
        assert "id: " not in reply.text.replace('"id": ', "")
        assert "X-Stream-Resumed" not in reply.headers
        sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)

        def text(**more: Any) -> str:
            chunks = sdk.chat.completions.create(model="m", **CHAT, **more)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

        plain = await trio.to_thread.run_sync(text)
        named = {"extra_headers": {"X-Stream-Id": "sdk"}}
        assert await trio.to_thread.run_sync(lambda: text(**named)) == plain == "né 漢 😀 so"


async def test_the_id_that_proxies_set_names_no_stream() -> None:
    """Calls that share one do not meet, and none of them asks for ids or is held for a return."""
    async with served() as (client, runtime):

        def ask(content: str) -> httpx.Response:
            body = {**CHAT, "messages": [{"role": "user", "content": content}]}
            headers = {"X-Request-Id": f"{'long ' * 40}same"}
            return client.post("/v1/chat/completions", json=body, headers=headers)

        async with trio.open_nursery() as nursery:
            replies: list[httpx.Response] = []

            async def call(content: str) -> None:
                replies.append(await trio.to_thread.run_sync(ask, content))

            for content in ("one", "two"):
                nursery.start_soon(call, content)
        for reply in replies:
            assert reply.status_code == 200
            assert "\nid: " not in reply.text
            assert "X-Stream-Id" not in reply.headers
        assert not len(runtime._streams)


def named(name: str, **more: Any) -> GenerationRequest:
    """A request with a ticket."""
    sampling = SamplingRequest(temperature=0.0)
    asked = {"max_tokens": 50, "ticket": StreamTicket(name), **more}
    return GenerationRequest(TokenPrompt((5, 6, 7)), sampling, **asked)


async def test_the_row_goes_on_for_the_grace_and_no_longer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A client that comes back in time finds it further on; one that does not frees the row."""
    device = ScriptedDevice(decode_seconds=1.0)
    async with company(device, stream_grace=10.0) as (runtime, _):
        expected = await whole(runtime, named("straight"))
        async with runtime.generate(named("a")) as generation:
            await generation.next_event()
        await trio.sleep(8)
        assert runtime.stats()["requests"] == {"active": 1}
        started = trio.current_time()
        (await whole(runtime, named("a"))).same_as(expected)
        assert trio.current_time() - started < 45
        async with runtime.generate(named("b")) as generation:
            await generation.next_event()
        await trio.sleep(12)
        assert runtime.stats()["requests"] == {"active": 0}
        await settle(runtime)
        decodes = sum(len(plan.decode) for plan in device.plans)
        (await whole(runtime, named("b", ticket=StreamTicket("b", returns=True)))).same_as(expected)
        assert sum(len(plan.decode) for plan in device.plans) - decodes < 45
        await trio.sleep(11)
        assert len(runtime._streams) == 0
        with pytest.raises(UnknownStream):
            await whole(runtime, named("b", ticket=StreamTicket("b", returns=True)))


async def test_the_newer_connection_reads_on(autojump_clock: trio.testing.MockClock) -> None:
    """A server may not know yet that the old connection is dead: that one is told, and leaves."""
    async with company(ScriptedDevice(decode_seconds=1.0)) as (runtime, _):
        expected = await whole(runtime, named("straight"))
        async with runtime.generate(named("a")) as old:
            await old.next_event()
            async with trio.open_nursery() as nursery:
                told: list[object] = []

                async def wait() -> None:
                    while not isinstance(event := await old.next_event(), Failed):
                        pass
                    told.append(event)

                nursery.start_soon(wait)
                await trio.sleep(3)
                (await whole(runtime, named("a"))).same_as(expected)
            assert len(told) == 1
        await settle(runtime)


async def test_stopping_ends_streams_that_nobody_reads(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A drain does not wait for clients that are away."""
    async with company(ScriptedDevice(decode_seconds=1.0)) as (runtime, _):
        async with runtime.generate(named("a")) as generation:
            await generation.next_event()
        assert await runtime.drain(5.0)


async def test_another_body_is_refused_while_the_stream_runs(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The library says so too."""
    async with company(ScriptedDevice(decode_seconds=1.0)) as (runtime, _):
        async with runtime.generate(named("a")) as generation:
            await generation.next_event()
            with pytest.raises(InvalidRequest):
                await whole(runtime, named("a", max_tokens=7))


PIECES = st.lists(
    st.tuples(st.sampled_from(Channel), st.text(min_size=1, max_size=5)), min_size=1, max_size=12
)


@given(PIECES, st.data())
def test_a_cursor_gives_each_character_once(
    pieces: list[tuple[Channel, str]], data: st.DataObject
) -> None:
    """However the text is cut at the first and at the second reading."""
    deltas = [TextDelta(channel, text) for channel, text in pieces]
    read = data.draw(st.integers(0, len(deltas)))
    first = Cursor(None)
    for delta in deltas[:read]:
        assert first.split(delta) == (None, delta)
    place = data.draw(st.sampled_from([first.position]))
    second = Cursor(Position(place.chars, place.scores))
    merged = [TextDelta(Channel.CONTENT, "".join(d.text for d in deltas))]
    again = deltas if data.draw(st.booleans()) else merged
    unread = "".join(rest.text for d in again if (rest := second.split(d)[1]) is not None)
    assert unread == "".join(d.text for d in deltas[read:])
    assert second.position.chars == sum(len(d.text) for d in deltas)


async def test_what_is_retained_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    """Beyond its bound an outbox lets go of what was read, never of what was not."""
    box = Outbox(retain=400)
    reader = box.begin()
    for _ in range(9):
        box.put(TextDelta(Channel.CONTENT, "x" * 10))
        await box.take(reader)
    assert box.is_whole
    box.put(TextDelta(Channel.CONTENT, "y" * 20))
    assert not box.is_whole
    assert not box._read
    assert await box.take(reader) == TextDelta(Channel.CONTENT, "y" * 20)
