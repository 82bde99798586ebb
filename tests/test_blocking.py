"""The blocking front door, on a real thread and the real clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from company import SETTINGS, WordTokenizer, ask, counted

from mlx_troupe.actors import supervisor
from mlx_troupe.actors.blocking import BlockingRuntime, open_blocking_runtime
from mlx_troupe.actors.gpu import ModelRefused
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.errors import InvalidRequest, ModelError, Overloaded, Unavailable
from mlx_troupe.runtime.requests import Failed, Finished, GenerationEvent, TextDelta


class PacedDevice(ScriptedDevice):
    """Every step waits until a test lets it go, or goes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def settle(self):  # type: ignore[no-untyped-def]
        assert self.go.wait(20)
        return super().settle()


@contextmanager
def opened(device: ScriptedDevice | None = None) -> Iterator[BlockingRuntime]:
    device = device or ScriptedDevice()
    with open_blocking_runtime(SETTINGS, device=device, tokenizer=WordTokenizer) as runtime:
        yield runtime


def text_of(events: list[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def wait_until_idle(runtime: BlockingRuntime) -> None:
    """Ask until no request is active; each ask is a turn of the company's loop."""
    for _ in range(100_000):
        stats = runtime.stats()
        if stats["requests"] == {"active": 0} and stats["device"]["rows"] == 0:  # type: ignore[index]
            return
    raise AssertionError("a row was left")


def test_a_loop_over_events_gets_text_and_end() -> None:
    """The same events as for async callers, the terminal one last."""
    with opened() as runtime:
        assert runtime.wait_ready().name == "scripted"
        generation = runtime.generate(ask(1, 2, 3, max_tokens=20))
        assert generation.prompt_tokens == 3
        events = list(generation)
        assert generation.cached_tokens == 0
        assert text_of(events) == counted(3, 20)
        assert isinstance(events[-1], Finished)
        assert runtime.health().status == "ok"


def test_breaking_out_of_the_loop_cancels() -> None:
    """The row is gone although it had thousands of tokens to go."""
    device = PacedDevice()
    with opened(device) as runtime:
        for event in runtime.generate(ask(1, max_tokens=4_000)):
            assert isinstance(event, TextDelta)
            break
        wait_until_idle(runtime)
        assert not device.rows
        assert runtime.stats()["scheduler"]["cancelled"] == 1  # type: ignore[index]


def test_closing_and_leaving_the_block_cancel_too() -> None:
    """A generation that was never iterated ends as well."""
    device = PacedDevice()
    device.go.clear()
    with opened(device) as runtime:
        with runtime.generate(ask(1, max_tokens=4_000)) as generation:
            pass
        assert list(generation) == []
        other = runtime.generate(ask(2, max_tokens=4_000))
        other.close()
        other.close()
        device.go.set()
        wait_until_idle(runtime)


def test_errors_are_raised_where_the_request_is_made() -> None:
    """A bad request raises from generate, and the next one is served."""
    device = PacedDevice()
    with opened(device) as runtime:
        with pytest.raises(InvalidRequest):
            runtime.generate(ask(1, max_tokens=0))
        device.go.clear()
        held = [runtime.generate(ask(1, max_tokens=9)) for _ in range(12)]
        with pytest.raises(Overloaded):
            runtime.generate(ask(1))
        device.go.set()
        assert [text_of(list(generation)) for generation in held] == [counted(1, 9)] * 12
        assert runtime.clear_cache() == 0


def test_states_are_written_before_the_block_is_left(tmp_path: Path) -> None:
    """And a chat is closed; without a folder there is nothing to flush."""
    ids = tuple(range(1, 60))
    for already in (0, len(ids) - 1):
        settings = replace(SETTINGS, ssd_cache=tmp_path)
        with open_blocking_runtime(
            settings, device=ScriptedDevice(), tokenizer=WordTokenizer
        ) as runtime:
            generation = runtime.generate(ask(*ids, session="chat"))
            assert text_of(list(generation)) == counted(ids[-1], 5)
            assert generation.cached_tokens == already
            assert runtime.flush_cache(30.0).durable
            assert (runtime.close_session("chat"), runtime.close_session("chat")) == (True, False)
    with opened() as runtime, pytest.raises(Unavailable, match="no SSD cache"):
        runtime.flush_cache(1.0)


def test_several_threads_share_the_batch() -> None:
    """Each thread gets its own text."""
    texts: dict[int, str] = {}

    with opened() as runtime:

        def client(i: int) -> None:
            texts[i] = text_of(list(runtime.generate(ask(i, max_tokens=30))))

        threads = [threading.Thread(target=client, args=(i,)) for i in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert texts == {i: counted(i, 30) for i in range(1, 9)}


def test_leaving_the_block_ends_what_runs() -> None:
    """A generation that outlives its runtime can be dropped without harm."""
    device = PacedDevice()
    with opened(device) as runtime:
        left = runtime.generate(ask(1, max_tokens=4_000))
    assert not device.rows
    del left


def test_a_model_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """wait_ready raises, and so does the block."""
    monkeypatch.setattr(supervisor, "FAREWELL_SECONDS", 0.0)
    device = ScriptedDevice()
    device.fail_next = ModelError("torn")
    with pytest.RaisesGroup(ModelRefused, flatten_subgroups=True), opened(device) as runtime:
        with pytest.raises(Unavailable, match="torn"):
            runtime.wait_ready()
        with pytest.raises(Unavailable):
            runtime.generate(ask(1))


def test_it_refuses_to_open_inside_a_running_loop() -> None:
    """Trio or asyncio: it would block the loop, and says so."""

    async def inside() -> None:
        with opened():
            pass

    with pytest.raises(RuntimeError, match="running trio loop"):
        trio.run(inside)
    with pytest.raises(RuntimeError, match="running asyncio loop"):
        asyncio.run(inside())


def test_a_failed_generation_is_an_event() -> None:
    """A fault of the device ends the iteration with Failed."""
    device = PacedDevice()
    device.go.clear()
    with opened(device) as runtime:
        generation = runtime.generate(ask(1, max_tokens=50))
        device.fail_on, device.fail_next = "settle", RuntimeError("gone")
        device.go.set()
        events = list(generation)
        assert isinstance(events[-1], Failed)
        assert "gone" in events[-1].error.message
        assert text_of(list(runtime.generate(ask(1, max_tokens=3)))) == counted(1, 3)
