"""Sessions: who names them, what the name changes, and what closing one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from company import ask, company, run, settle

from mlx_troupe.actors.disk import FolderDisk
from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import ScriptedRuntime
from mlx_troupe.http.wire.session import LONGEST_NAME, session_of
from mlx_troupe.runtime.requests import Finished, GenerationRequest
from mlx_troupe.runtime.resume.records import Record
from mlx_troupe.runtime.spill.store import SpillStore

BODY = {"messages": [{"role": "user", "content": "hi"}]}
CARRIERS = (
    ("session_id", None),
    ("prompt_cache_key", None),
    (None, "X-Session-Affinity"),
    (None, "session_id"),
)


async def session_seen(
    body: dict[str, object], headers: dict[str, str], settings: HttpSettings | None = None
) -> str | None:
    """The session of the request that the runtime is given."""
    runtime = ScriptedRuntime()
    client = create_app(runtime, settings or HttpSettings()).test_client()
    answer = await client.post(
        "/v1/chat/completions", json={**BODY, **body}, headers={"Host": "127.0.0.1", **headers}
    )
    assert answer.status_code == 200, await answer.get_data()
    (request,) = runtime.requests
    return request.session


@pytest.mark.parametrize("first", range(4))
async def test_the_first_carrier_that_says_something_counts(first: int) -> None:
    """Body ``session_id``, body ``prompt_cache_key``, ``X-Session-Affinity``, ``session_id``."""
    body: dict[str, object] = {}
    headers: dict[str, str] = {}
    for place, (field, header) in enumerate(CARRIERS):
        said = "" if place < first else f"carrier {place}"
        if field:
            body[field] = said
        if header:
            headers[header] = said
    assert await session_seen(body, headers) == f"carrier {first}"


async def test_without_a_carrier_there_is_no_session() -> None:
    """Null and empty names are none."""
    assert await session_seen({"session_id": None}, {}) is None
    assert await session_seen({}, {"session_id": ""}) is None


@pytest.mark.parametrize(("field", "header"), CARRIERS)
async def test_an_operator_may_have_the_names_ignored(
    field: str | None, header: str | None
) -> None:
    """Whoever carries them; and there is nothing to close."""
    deaf = HttpSettings(sessions=False)
    body: dict[str, object] = {field: "mine"} if field else {}
    headers = {header: "mine"} if header else {}
    assert await session_seen(body, headers) == "mine"
    assert await session_seen(body, headers, deaf) is None
    runtime = ScriptedRuntime()
    runtime.sessions.add("mine")
    answer = await (
        create_app(runtime, deaf)
        .test_client()
        .post("/admin/cache/session/close", json={"session_id": "mine"})
    )
    assert (answer.status_code, await answer.get_json()) == (200, {"closed": False})


def test_very_long_names_are_told_apart_and_take_no_room() -> None:
    """A digest stands for them."""
    long = ["x" * 100_000 + end for end in "ab"]
    names = {session_of(name) for name in long}
    assert len(names) == 2
    assert all(name is not None and len(name) <= LONGEST_NAME for name in names)


async def test_closing_answers_whether_anything_was_kept() -> None:
    """Known once, then not; a name is needed."""
    runtime = ScriptedRuntime()
    runtime.sessions.add("a")
    client = create_app(runtime).test_client()
    answers = []
    for body in ({"session_id": "a"}, {"session_id": "a"}, {"session_id": ""}, {}):
        answer = await client.post(
            "/admin/cache/session/close", json=body, headers={"Host": "127.0.0.1"}
        )
        answers.append((answer.status_code, (await answer.get_json()).get("closed")))
    assert answers == [(200, True), (200, False), (400, None), (400, None)]


def chat(number: int, session: str | None = None) -> GenerationRequest:
    """A prompt of forty ids of its own."""
    return ask(*range(number * 100, number * 100 + 40), session=session)


async def cached(runtime: Runtime, request: GenerationRequest) -> tuple[str, int]:
    """The answer, and how much of the prompt needed no computing."""
    text, end = await run(runtime, request)
    assert isinstance(end, Finished)
    return text, end.usage.cached_tokens


@pytest.mark.parametrize("close", [True, False])
async def test_a_closed_session_leaves_first_and_no_answer_changes(
    close: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Without the close the oldest chat would go; every text is that of a cold run either way."""
    async with company(prompt_cache_bytes=190) as (runtime, _):
        for number, session in ((1, "a"), (2, "b"), (3, "c"), (4, None)):
            await run(runtime, chat(number, session))
        assert runtime.stats()["prompt_cache"]["sessions"] == 3  # type: ignore[index]
        if close:
            assert await runtime.close_session("b")
            assert not await runtime.close_session("b")
        await run(runtime, chat(5))
        await runtime.cast.scheduler.copied()
        first, second = await cached(runtime, chat(1)), await cached(runtime, chat(2))
        assert (first[1] > 0) is close
        assert second[1] == (0 if close else 39)
        assert (first[0], second[0]) == (" 140 141 142 143 144", " 240 241 242 243 244")


async def test_any_session_uses_what_another_one_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The name decides nothing about which states serve whom."""
    async with company(prompt_cache_bytes=10_000) as (runtime, _):
        await run(runtime, chat(1, "a"))
        assert (await cached(runtime, chat(1, "b")))[1] == 39
        assert await runtime.close_session("a")
        assert (await cached(runtime, chat(1)))[1] == 39


async def test_closing_waits_for_no_flush_and_removes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither a state nor an interrupted answer; a busy disk is nobody's concern here (H-10)."""
    disk = ScriptedDisk(save_seconds=500.0)
    async with company(disk=disk) as (runtime, _):
        await run(runtime, chat(1, "a"))
        await runtime.cast.scheduler.copied()
        runtime.checkpoints.keep(Record("ab", 1, (1, 2)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.flush_cache, 1000.0)
            await trio.sleep(1)
            began = trio.current_time()
            assert await runtime.close_session("a")
            assert trio.current_time() - began < 1
        assert len(runtime.checkpoints) == 1
        assert (await cached(runtime, chat(1)))[1] == 39
        assert runtime.stats()["ssd_cache"]["entries"] == 1  # type: ignore[index]


def branch(number: int) -> GenerationRequest:
    """Such a prompt and one token that its answer did not begin with, from nobody's chat."""
    return ask(*range(number * 100, number * 100 + 40), 7)


def sessions(runtime: Runtime) -> int:
    """How many chats memory knows of."""
    block = runtime.stats()["prompt_cache"]
    assert isinstance(block, dict)
    return int(block["sessions"])


async def test_a_session_outlives_a_restart(autojump_clock: trio.testing.MockClock) -> None:
    """What comes back from the disk is its chat's again, until that is closed."""
    disk = ScriptedDisk()
    async with company(disk=disk) as (runtime, _):
        for number, session in ((1, None), (2, "b")):
            await run(runtime, chat(number, session))
        assert (await runtime.flush_cache(60)).durable
    async with company(disk=disk) as (runtime, _):
        assert sessions(runtime) == 0
        for number in (2, 1):
            assert (await cached(runtime, branch(number)))[1] == 40
            await settle(runtime)
        assert sessions(runtime) == 1
        assert await runtime.close_session("b")
        assert sessions(runtime) == 0
        assert not await runtime.close_session("b")


async def test_a_closed_session_is_closed_after_a_restart(tmp_path: Path) -> None:
    """What it left serves others, and is nobody's; closing it again finds nothing."""
    async with company(disk=FolderDisk(SpillStore(tmp_path))) as (runtime, _):
        await run(runtime, chat(2, "b"))
        await settle(runtime)
        assert (await runtime.flush_cache(60)).durable
        assert await runtime.close_session("b")
        assert (await runtime.flush_cache(60)).durable
    async with company(disk=FolderDisk(SpillStore(tmp_path))) as (runtime, _):
        assert not await runtime.close_session("b")
        assert (await cached(runtime, branch(2)))[1] == 40
        await settle(runtime)
        assert sessions(runtime) == 0


@pytest.mark.parametrize("busy", [0, 1])
async def test_a_session_is_closed_for_what_is_not_written_yet(
    busy: int, autojump_clock: trio.testing.MockClock
) -> None:
    """A state that waits for the disk, or is on its way, does not bring the name back."""
    disk = ScriptedDisk(save_seconds=10)
    async with company(disk=disk) as (runtime, _):
        for number in range(busy):
            await run(runtime, chat(number + 5))
        await run(runtime, chat(2, "b"))
        await settle(runtime)
        assert len(disk.states) == 0
        assert await runtime.close_session("b")
        assert (await runtime.flush_cache(60)).durable
        kept = [candidate for candidate, _ in disk.states.values()]
        assert [candidate.session for candidate in kept] == [None] * (busy + 1)


@pytest.mark.parametrize("restored", [True, False])
async def test_closing_forgets_what_a_chat_has_on_disk(restored: bool, tmp_path: Path) -> None:
    """It is told that something was kept, and the files of that chat make way for others first."""
    async with company(disk=FolderDisk(SpillStore(tmp_path))) as (runtime, _):
        for number, session in ((1, None), (2, "b"), (3, None)):
            await run(runtime, chat(number, session))
            await settle(runtime)
            assert (await runtime.flush_cache(60)).durable
        block = runtime.stats()["ssd_cache"]
        assert isinstance(block, dict)
    size = int(block["bytes"])
    disk = FolderDisk(SpillStore(tmp_path, max_bytes=size + 100))
    async with company(disk=disk) as (runtime, _):
        if restored:
            assert (await cached(runtime, chat(2, "b")))[1] == 39
            await settle(runtime)
            assert sessions(runtime) == 1
        assert await runtime.close_session("b")
        assert not await runtime.close_session("b")
        assert sessions(runtime) == 0
        await run(runtime, chat(4))
        await settle(runtime)
        await runtime.flush_cache(60)
    async with company(disk=FolderDisk(SpillStore(tmp_path))) as (runtime, _):
        found = [(await cached(runtime, chat(number)))[1] for number in (1, 2, 3, 4)]
    assert found == [39, 0, 39, 39]
