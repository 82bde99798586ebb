"""Explained misses: what each tier had, where the nearest prompt parts, and why it is no use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from company import ask, company, run
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.actors.explaining import with_disk
from mlx_troupe.actors.scripted_disk import ScriptedDisk
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.testing import ScriptedRuntime
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.plans import SnapshotId
from mlx_troupe.runtime.prefix.entries import namespace_of
from mlx_troupe.runtime.prefix.explain import Explanation
from mlx_troupe.runtime.prefix.index import PrefixCore
from mlx_troupe.runtime.requests import CacheNote, Finished, FinishReason, GenerationRequest, Usage
from mlx_troupe.runtime.spill.index import Near

KEPT = tuple(range(10, 50))


def keep(
    core: PrefixCore,
    ids: tuple[int, ...],
    snapshot: int = 1,
    *,
    window: int | None = None,
    namespace: str = "m",
    session: str | None = None,
) -> None:
    core.put(
        ids,
        namespace,
        SnapshotId(snapshot),
        len(ids),
        kind="final",
        trim_window=window,
        session=session,
    )


def told(core: PrefixCore, ids: tuple[int, ...], **more: Any) -> Explanation:
    return core.explain(ids, more.pop("namespace", "m"), **{"trim_window": None, **more})


def test_another_text_is_shown_where_it_begins() -> None:
    """Position, both sides of it, and the other prompt for its own session only."""
    core = PrefixCore(1000)
    keep(core, KEPT, session="mine")
    ids = (*KEPT[:20], *range(900, 920))
    seen = told(core, ids)
    assert seen == Explanation(20, 20, "text", KEPT[12:20], ids[20:28])
    assert told(core, ids, session="other").theirs == ()
    assert told(core, ids, session="mine").theirs == KEPT[20:28]


def test_a_chat_that_merely_goes_on_misses_nothing() -> None:
    """The nearest prompt ends where the new text begins."""
    core = PrefixCore(1000)
    keep(core, KEPT)
    assert told(core, (*KEPT, 1, 2, 3)) == Explanation(40, 40, None)
    assert told(core, KEPT) == Explanation(39, 39, None)


def test_nothing_that_begins_alike() -> None:
    """An empty cache, and one of other prompts."""
    core = PrefixCore(1000)
    assert told(core, KEPT).reason == "nothing_kept"
    keep(core, KEPT)
    assert told(core, (5, 6, 7)) == Explanation(0, 0, "nothing_kept", after=(5, 6, 7))


def test_a_state_of_other_adapters_is_named() -> None:
    """It shares more, and cannot be used."""
    core = PrefixCore(1000)
    keep(core, KEPT, namespace=namespace_of("m", ("a",)))
    keep(core, KEPT, 2, namespace="another model")
    seen = told(core, (*KEPT, 1))
    assert (seen.memory_tokens, seen.shared_tokens, seen.reason) == (0, 40, "adapters")
    assert told(core, (*KEPT, 1), namespace=namespace_of("m", ("a",))).reason is None


@pytest.mark.parametrize("window", [0, 20])
def test_a_state_that_cannot_be_cut_is_named(window: int) -> None:
    """Recurrent states and turned rings serve at their own length only."""
    core = PrefixCore(1000)
    keep(core, KEPT[:10], 1, window=window)
    keep(core, KEPT, 2, window=window)
    seen = told(core, (*KEPT[:30], 1, 2), trim_window=window)
    assert (seen.memory_tokens, seen.shared_tokens, seen.reason) == (10, 30, "uncuttable")
    assert told(core, (*KEPT, 1, 2), trim_window=window).reason is None


def test_a_state_past_its_threshold_is_named() -> None:
    """Encoded for good, where a cold row would be plain."""
    core = PrefixCore(1000)
    keep(core, KEPT)
    seen = told(core, (*KEPT[:10], 1, 2), trim_floor=16)
    assert (seen.memory_tokens, seen.shared_tokens, seen.reason) == (0, 10, "threshold")
    assert told(core, (*KEPT[:20], 1, 2), trim_floor=16).reason == "text"


def test_a_state_that_had_to_go_is_named() -> None:
    """Given up for room; as long as it is remembered."""
    core = PrefixCore(60)
    keep(core, KEPT, 1)
    keep(core, tuple(range(500, 540)), 2)
    seen = told(core, (*KEPT, 7))
    assert (seen.memory_tokens, seen.shared_tokens, seen.reason) == (0, 40, "evicted")
    for number in range(100):
        keep(core, tuple(range(600 + number, 640 + number)), 3 + number)
    assert told(core, (*KEPT, 7)).reason == "nothing_kept"


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@given(
    kept=st.lists(prompts, max_size=6),
    ids=prompts,
    window=st.sampled_from((None, 0, 4)),
    budget=st.integers(1, 40),
)
def test_what_is_told_is_what_a_lookup_finds(
    kept: list[tuple[int, ...]], ids: tuple[int, ...], window: int | None, budget: int
) -> None:
    """Tokens served as told; never less shared than served; no reason where all is served."""
    core = PrefixCore(budget)
    for number, prompt in enumerate(kept):
        keep(core, prompt, number, window=window)
    seen = told(core, ids, trim_window=window)
    hit = core.lookup(ids, "m", trim_window=window)
    assert seen.memory_tokens == (0 if hit is None else hit.length)
    assert seen.shared_tokens >= seen.memory_tokens
    if seen.memory_tokens == len(ids) - 1:
        assert seen.reason is None
    if seen.reason == "uncuttable":
        assert window is not None
    if seen.reason == "text":
        # What is larger than the budget was never kept, and nothing is known of it.
        known = [p for p in kept if len(p) <= budget]
        assert any(p[: seen.shared_tokens] == ids[: seen.shared_tokens] for p in known)
        assert ids[: seen.shared_tokens + 1] not in {p[: seen.shared_tokens + 1] for p in known}


async def note(runtime: Runtime, request: GenerationRequest) -> tuple[CacheNote | None, int]:
    """What the usage says."""
    _, end = await run(runtime, request)
    assert isinstance(end, Finished)
    await runtime.cast.scheduler.copied()
    return end.usage.cache, end.usage.cached_tokens


async def test_a_request_that_asks_is_told(autojump_clock: trio.testing.MockClock) -> None:
    """Cold, short and whole hits; texts as the tokenizer spells them; others are told nothing."""
    async with company(prompt_cache_bytes=1000) as (runtime, _):
        cold, _ = await note(runtime, ask(*KEPT, explain=True, session="me"))
        assert cold == CacheNote(0, 0, 0, "nothing_kept", "", " 10 11 12 13 14 15 16 17", "")
        short, cached = await note(
            runtime, ask(*KEPT[:30], *range(300, 310), explain=True, session="me")
        )
        assert (cached, short) == (
            30,
            CacheNote(
                30,
                0,
                30,
                "text",
                " 32 33 34 35 36 37 38 39",
                " 300 301 302 303 304 305 306 307",
                " 40 41 42 43 44 45 46 47",
            ),
        )
        whole, cached = await note(runtime, ask(*KEPT, explain=True))
        assert (cached, whole) == (39, CacheNote(39, 0, 39, None))
        assert (await note(runtime, ask(*KEPT)))[0] is None


async def test_the_answer_before_is_known_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """A chat that goes on the moment it may is told of the state that its row then gets."""
    async with company(prompt_cache_bytes=1000) as (runtime, _):
        text, _ = await run(runtime, ask(*KEPT, max_tokens=5))
        ids = (*KEPT, *map(int, text.split()), 7)
        _, end = await run(runtime, ask(*ids, explain=True))
        assert isinstance(end, Finished)
        assert end.usage.cache is not None
        assert end.usage.cache.memory_tokens == end.usage.cached_tokens >= len(KEPT) + 4


async def test_the_disk_is_told_apart(autojump_clock: trio.testing.MockClock) -> None:
    """After a restart memory has nothing, the disk all; the row is served from it."""
    disk = ScriptedDisk(save_seconds=0.1, load_seconds=0.1)
    async with company(disk=disk) as (runtime, _):
        await note(runtime, ask(*KEPT))
        assert (await runtime.flush_cache(60)).durable
    async with company(disk=disk) as (runtime, _):
        seen, cached = await note(runtime, ask(*KEPT, explain=True))
        assert seen is not None
        assert (seen.memory_tokens, seen.disk_tokens, cached) == (0, 39, 39)
        seen, _ = await note(runtime, ask(*KEPT, explain=True))
        assert seen is not None
        assert seen.memory_tokens == 39


async def left_on(disk: ScriptedDisk, model: ModelInfo, *prompts: tuple[int, ...]) -> None:
    """A disk with the states of some prompts, as one model makes them."""
    async with company(ScriptedDevice(model), disk=disk) as (runtime, _):
        for prompt in prompts:
            await note(runtime, ask(*prompt))
        assert (await runtime.flush_cache(60)).durable


PLAIN = ModelInfo("m", 1000, 4096, frozenset({0}), namespace="plain")


async def test_a_restart_forgets_no_reason(autojump_clock: trio.testing.MockClock) -> None:
    """What only the disk knows is explained as what memory knows; of two the nearer one."""
    disk = ScriptedDisk()
    await left_on(disk, PLAIN, KEPT)
    async with company(ScriptedDevice(PLAIN), disk=disk) as (runtime, _):
        seen, cached = await note(runtime, ask(*KEPT, explain=True))
        assert (cached, seen) == (39, CacheNote(0, 39, 39, None))
    async with company(ScriptedDevice(PLAIN), disk=disk) as (runtime, _):
        seen, cached = await note(runtime, ask(*KEPT[:20], 300, 301, explain=True))
        before = "".join(f" {i}" for i in KEPT[12:20])
        assert (cached, seen) == (20, CacheNote(0, 20, 20, "text", before, " 300 301"))
        seen, _ = await note(runtime, ask(*KEPT, 50, explain=True))
        assert seen is not None
        assert seen.reason in (None, "text"), "the answer may go on otherwise"
        seen, _ = await note(runtime, ask(700, 701, explain=True))
        assert seen is not None
        assert (seen.shared_tokens, seen.reason) == (0, "nothing_kept")


@pytest.mark.parametrize(
    "changed",
    [replace(PLAIN, namespace="in 8 bits"), replace(PLAIN, namespace="another build")],
)
async def test_states_of_another_setup_are_named(
    changed: ModelInfo, autojump_clock: trio.testing.MockClock
) -> None:
    """A server that was started otherwise finds nothing, and says that this is why."""
    disk = ScriptedDisk()
    await left_on(disk, PLAIN, KEPT)
    async with company(ScriptedDevice(changed), disk=disk) as (runtime, _):
        seen, cached = await note(runtime, ask(*KEPT, 7, explain=True))
        assert seen is not None
        assert (cached, seen.memory_tokens, seen.disk_tokens) == (0, 0, 0)
        assert (seen.shared_tokens, seen.reason, seen.after) == (40, "setup", " 7")


async def test_a_state_that_memory_gave_up_and_the_disk_has_is_no_loss(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Evicted is told only where it costs something."""
    disk = ScriptedDisk()
    async with company(disk=disk, prompt_cache_bytes=80) as (runtime, _):
        await note(runtime, ask(*KEPT))
        assert (await runtime.flush_cache(60)).durable
        await note(runtime, ask(*range(500, 540)))
        seen, cached = await note(runtime, ask(*KEPT, explain=True))
        assert runtime.cast.cache.core.stats().evictions
        assert (cached, seen) == (39, CacheNote(0, 39, 39, None))
    async with company(prompt_cache_bytes=80) as (runtime, _):
        await note(runtime, ask(*KEPT))
        await note(runtime, ask(*range(500, 540)))
        seen, cached = await note(runtime, ask(*KEPT, explain=True))
        assert seen is not None
        assert (cached, seen.reason) == (0, "evicted")


OWN, OTHER = Near(30, 50), Near(35, 60)
IDS = tuple(range(100, 141))


@pytest.mark.parametrize(
    ("memory", "usable", "near", "told"),
    [
        (Explanation(0, 0, "nothing_kept"), 0, (None, None, None), (0, "nothing_kept")),
        (Explanation(0, 0, "nothing_kept"), 30, (OWN, None, None), (30, "text")),
        (Explanation(0, 0, "nothing_kept"), 30, (Near(30, 30), None, None), (30, None)),
        (Explanation(0, 0, "nothing_kept"), 10, (OWN, None, None), (30, "uncuttable")),
        (Explanation(0, 0, "nothing_kept"), 30, (OWN, OTHER, None), (35, "adapters")),
        (Explanation(0, 0, "nothing_kept"), 30, (OWN, None, OTHER), (35, "setup")),
        (Explanation(0, 30, "evicted"), 30, (OWN, None, None), (30, "text")),
        (Explanation(0, 35, "evicted"), 30, (OWN, None, None), (35, "evicted")),
        (Explanation(0, 36, "adapters"), 30, (OWN, OTHER, OTHER), (36, "adapters")),
        (Explanation(10, 30, "uncuttable"), 30, (OWN, None, None), (30, "text")),
        (Explanation(40, 40, None), 30, (OWN, OTHER, Near(41, 60)), (40, None)),
        (Explanation(0, 0, "nothing_kept"), 40, (Near(41, 60), None, None), (40, None)),
    ],
)
def test_the_nearest_of_both_tiers_explains(
    memory: Explanation,
    usable: int,
    near: tuple[Near | None, Near | None, Near | None],
    told: tuple[int, str | None],
) -> None:
    """Whoever shares most; no reason where all but the last token is served."""
    seen = with_disk(IDS, memory, usable, near)
    assert (seen.shared_tokens, seen.reason) == told
    assert seen.memory_tokens == memory.memory_tokens


def test_the_chat_that_a_text_was_said_in_is_told_as_before() -> None:
    """A disk that knows no more does not hide how the session's own prompt goes on."""
    memory = Explanation(30, 30, "text", (1,), (2,), (3,))
    assert with_disk(IDS, memory, 30, (OWN, None, None)) is memory


async def test_a_recurrent_model_says_why(autojump_clock: trio.testing.MockClock) -> None:
    """The chat before is further than what the two prompts share."""
    model = ModelInfo("r", 1000, 4096, frozenset({0}), trim_window=0, namespace="r")
    async with company(ScriptedDevice(model), prompt_cache_bytes=1000) as (runtime, _):
        await note(runtime, ask(*KEPT))
        seen, cached = await note(runtime, ask(*KEPT[:30], 1, 2, explain=True))
        assert cached == 0
        assert seen is not None
        assert (seen.memory_tokens, seen.shared_tokens, seen.reason) == (0, 30, "uncuttable")


@pytest.mark.parametrize(("header", "asked"), [("1", True), ("0", False), (None, False)])
async def test_the_header_asks_and_the_usage_tells(header: str | None, asked: bool) -> None:
    """``usage.cache`` is there for those who asked, and for nobody else."""
    told_note = CacheNote(3, 2, 5, "text", "a", "b", "c") if asked else None
    end = Finished(FinishReason.STOP, Usage(9, 1, 3, "batched", told_note))
    runtime = ScriptedRuntime((end,))
    client = create_app(runtime).test_client()
    headers = {"Host": "127.0.0.1"} | ({} if header is None else {"X-Cache-Explain": header})
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
    usage = (await answer.get_json())["usage"]
    assert runtime.requests[0].explain is asked
    expected = {
        "memory_tokens": 3,
        "disk_tokens": 2,
        "shared_tokens": 5,
        "reason": "text",
        "before": "a",
        "after": "b",
        "theirs": "c",
    }
    assert usage.get("cache") == (expected if asked else None)
