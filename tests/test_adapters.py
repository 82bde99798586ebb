"""Adapters on the scripted device: mounted, used, swapped and unmounted while rows run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from company import SETTINGS, ask, company, counted, nothing_left, run, settle, until
from scripted_adapters import QUERY, write_adapter
from test_crashes import Clients, Injected, crash_once, works_again

from mlx_troupe.actors.adapters import ASKS
from mlx_troupe.actors.blocking import open_blocking_runtime
from mlx_troupe.actors.gpu import ModelRefused
from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.runtime.adapter_fit import AdapterTarget
from mlx_troupe.runtime.adapters import inspect_adapter
from mlx_troupe.runtime.errors import AdapterError, InvalidRequest, Overloaded, Unavailable
from mlx_troupe.runtime.plans import FromRow, FromSnapshot, StartRow
from mlx_troupe.runtime.requests import Failed, Finished
from mlx_troupe.runtime.text.testing import ByteTokenizer

PROMPT = tuple(range(1, 101))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory for adapters."""
    return tmp_path


def revision_of(folder: Path) -> str:
    return inspect_adapter(folder).revision


def starts(device: ScriptedDevice) -> list[StartRow]:
    """Every row that was started, in order."""
    return [start for plan in device.plans for start in plan.start]


async def served(runtime: Runtime, *ids: int, **more: Any) -> Finished:
    """One request that must end well, and say what the script says."""
    text, end = await run(runtime, ask(*ids, **more))
    assert isinstance(end, Finished), end
    assert text == counted(ids[-1], 5)
    return end


# ---- mounting and selecting ---------------------------------------------------------------


async def test_a_mounted_adapter_is_used_by_the_requests_that_name_it(
    autojump_clock: object, folder: Path
) -> None:
    """Its revision comes with their rows; others run on the base model."""
    path = write_adapter(folder / "sql")
    async with company() as (runtime, device):
        info = await runtime.mount_adapter("sql", path)
        assert (info.id, info.revision, info.rank) == ("sql", revision_of(path), 2)
        assert runtime.adapters == (info,)
        await served(runtime, 1, 2, 3, adapters=("sql",))
        await served(runtime, 1, 2, 3)
        await served(runtime, 1, 2, 3, adapters=())
        assert [start.adapters for start in starts(device)] == [(info.revision,), (), ()]
        figures = runtime.stats()["adapters"]
        assert isinstance(figures, dict)
        assert [one["id"] for one in figures["mounted"]] == ["sql"]
        assert (figures["default"], figures["mounts"]) == ([], 1)


@pytest.mark.parametrize("ids", [("nobody",), ("sql", "nobody"), ("sql", "sql"), ("sql",) * 9])
async def test_an_unknown_or_repeated_id_is_refused_by_name(
    autojump_clock: object, folder: Path, ids: tuple[str, ...]
) -> None:
    """Before anything is started."""
    async with company() as (runtime, device):
        await runtime.mount_adapter("sql", write_adapter(folder / "sql"))
        with pytest.raises(AdapterError) as caught:
            await run(runtime, ask(1, 2, adapters=ids))
        assert caught.value.param == "adapter"
        assert len(ids) > 8 or ids[-1] in caught.value.message
        assert not device.plans


async def test_folders_given_at_start_are_the_default_and_none_beats_it(
    autojump_clock: object, folder: Path
) -> None:
    """All of them in order; a request's own choice wins, the empty one too."""
    a, b = write_adapter(folder / "a", 1), write_adapter(folder / "b", 2)
    async with company(adapters=(b, a)) as (runtime, device):
        assert [info.id for info in runtime.adapters] == ["b", "a"]
        await served(runtime, 1, 2, 3)
        await served(runtime, 1, 2, 3, adapters=("a",))
        await served(runtime, 1, 2, 3, adapters=())
        assert [start.adapters for start in starts(device)] == [
            (revision_of(b), revision_of(a)),
            (revision_of(a),),
            (),
        ]
        await runtime.unmount_adapter("b")
        await served(runtime, 1, 2, 3)
        assert starts(device)[-1].adapters == (revision_of(a),)


@pytest.mark.parametrize(
    ("name", "content"), [("a", "nothing"), ("a", "unfit"), ("no id", "good"), ("none", "good")]
)
async def test_a_bad_adapter_fails_the_start(
    autojump_clock: object, folder: Path, name: str, content: str
) -> None:
    """With the reason; nothing is served without it."""
    path = folder / name
    path.mkdir()
    if content != "nothing":
        write_adapter(path)
    device = ScriptedDevice()
    if content == "unfit":
        device.targets = (AdapterTarget("model.other", "linear", 8, 8),)
    with pytest.RaisesGroup(
        pytest.RaisesExc((ModelRefused, AdapterError, Unavailable)), flatten_subgroups=True
    ) as caught:
        async with company(device, adapters=(path,)):
            pass
    assert name in str(caught.value.exceptions[0])


@pytest.mark.parametrize("adapter_id", ["", "a b", "../a", "a/b", "none", ".", "..", "a" * 129])
async def test_what_cannot_be_an_id_is_refused(
    autojump_clock: object, folder: Path, adapter_id: str
) -> None:
    """Also when the folder is good."""
    path = write_adapter(folder / "sql")
    async with company() as (runtime, device):
        with pytest.raises(AdapterError) as caught:
            await runtime.mount_adapter(adapter_id, path)
        assert caught.value.param == "id"
        assert not device.mounted


async def test_an_adapter_that_does_not_fit_changes_nothing(
    autojump_clock: object, folder: Path
) -> None:
    """The one that had the id stays."""
    good = write_adapter(folder / "good")
    bad = write_adapter(folder / "bad", modules={QUERY: (8, 16)})
    device = ScriptedDevice()
    device.targets = (AdapterTarget(QUERY, "linear", 8, 8),)
    async with company(device) as (runtime, device):
        info = await runtime.mount_adapter("sql", good)
        with pytest.raises(AdapterError, match="does not fit"):
            await runtime.mount_adapter("sql", bad)
        with pytest.raises(AdapterError, match="does not fit"):
            runtime.check_adapter(inspect_adapter(bad))
        runtime.check_adapter(inspect_adapter(good))
        assert runtime.adapters == (info,)
        assert set(device.mounted) == {info.revision}
        await served(runtime, 1, 2, 3, adapters=("sql",))


# ---- prefixes -----------------------------------------------------------------------------


async def test_kept_prefixes_are_shared_only_within_one_ordered_selection(
    autojump_clock: object, folder: Path
) -> None:
    """Base, one adapter, two, and the two reversed: each finds its own state and no other."""
    async with company() as (runtime, device):
        for seed, name in enumerate("ab"):
            await runtime.mount_adapter(name, write_adapter(folder / name, seed))
        selections: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]
        for selection in selections:
            end = await served(runtime, *PROMPT, adapters=selection)
            assert end.usage.cached_tokens == 0, selection
            await settle(runtime)
        for selection in selections:
            end = await served(runtime, *PROMPT, adapters=selection)
            assert end.usage.cached_tokens == 99, selection
        assert sum(isinstance(s.source, FromSnapshot) for s in starts(device)) == 5


async def test_rows_share_a_running_prefix_only_within_one_selection(
    autojump_clock: object, folder: Path
) -> None:
    """Of six rows with one prompt, those of the same adapters start from each other."""
    async with company(batch=8, prompt_cache_bytes=0) as (runtime, device):
        for seed, name in enumerate("ab"):
            await runtime.mount_adapter(name, write_adapter(folder / name, seed))
        async with trio.open_nursery() as nursery:
            for selection in [(), ("a", "b"), ("b", "a")] * 2:
                nursery.start_soon(partial(served, runtime, *PROMPT, adapters=selection))
        donors = {start.row: start for start in starts(device)}
        shared = [s for s in donors.values() if isinstance(s.source, FromRow)]
        assert len(shared) == 3
        for start in shared:
            assert isinstance(start.source, FromRow)
            assert donors[start.source.row].adapters == start.adapters


async def test_other_content_under_the_same_id_never_finds_old_state(
    autojump_clock: object, folder: Path
) -> None:
    """And the first content, mounted again, finds its own."""
    first, second = write_adapter(folder / "1", 1), write_adapter(folder / "2", 2)
    cached: list[int] = []
    async with company() as (runtime, _):
        for path in (first, second, first):
            await runtime.mount_adapter("sql", path)
            end = await served(runtime, *PROMPT, adapters=("sql",))
            cached.append(end.usage.cached_tokens)
            await settle(runtime)
    assert cached == [0, 0, 99]


# ---- under load ---------------------------------------------------------------------------


async def test_a_swap_under_load_drops_nothing(autojump_clock: object, folder: Path) -> None:
    """Running rows keep their revision, later ones take the new, whichever started when."""
    first, second = write_adapter(folder / "1", 1), write_adapter(folder / "2", 2)
    async with company() as (runtime, device), trio.open_nursery() as nursery:
        before = await runtime.mount_adapter("sql", first)
        crowd = Clients(runtime, nursery, adapters=("sql",))
        crowd.start(12)
        await trio.sleep(0.5)
        running = len(device.rows)
        after = await runtime.mount_adapter("sql", second)
        assert len(device.rows) == running == 4
        await until(lambda: set(device.mounted) == {after.revision})
        await until(lambda: crowd.all_ended)
        assert crowd.errors() == []
        used = [start.adapters for start in starts(device)]
        assert used == [(before.revision,)] * 4 + [(after.revision,)] * 8
        await works_again(runtime, device)


async def test_unmounting_in_use_lets_running_rows_end_and_refuses_those_that_wait(
    autojump_clock: object, folder: Path
) -> None:
    """A row that had not started is told which adapter is gone."""
    async with company() as (runtime, device), trio.open_nursery() as nursery:
        info = await runtime.mount_adapter("sql", write_adapter(folder / "sql"))
        crowd = Clients(runtime, nursery, adapters=("sql",))
        crowd.start(6)
        await trio.sleep(0.5)
        assert await runtime.unmount_adapter("sql") == info.mounted_layers == 1
        assert runtime.adapters == ()
        assert device.mounted == {}
        await until(lambda: crowd.all_ended)
        refused = [end.error for _, end in crowd.ends.values() if isinstance(end, Failed)]
        assert len(refused) == 2
        for error in refused:
            assert isinstance(error, InvalidRequest)
            assert error.param == "adapter"
            assert "sql" in error.message
        with pytest.raises(AdapterError, match="sql"):
            await runtime.unmount_adapter("sql")
        await works_again(runtime, device)


@pytest.mark.parametrize("moment", ["look up", "found"])
async def test_a_swap_between_queue_and_start_gives_weights_and_state_of_one_revision(
    autojump_clock: object, folder: Path, moment: str
) -> None:
    """A row that already had a prefix of the old revision gives it back and asks again."""
    first, second = write_adapter(folder / "1", 1), write_adapter(folder / "2", 2)
    async with company() as (runtime, device):
        await runtime.mount_adapter("sql", first)
        await served(runtime, *PROMPT, adapters=("sql",))
        await settle(runtime)
        info = await runtime.mount_adapter("other", second)
        core, table = runtime.cast.scheduler.core, runtime.cast.adapters.table
        real = core.found

        def swap_then(*args: Any) -> Any:
            core.found = real  # type: ignore[method-assign]
            answer = real(*args) if moment == "found" else ()
            # As the actor does it: from here on the id stands for what the device has mounted.
            table.put(replace(info, id="sql"))
            return answer if moment == "found" else real(*args)

        core.found = swap_then  # type: ignore[method-assign,assignment]
        end = await served(runtime, *PROMPT, adapters=("sql",))
        assert end.usage.cached_tokens == 0
        assert starts(device)[-1].adapters == (info.revision,)
        await works_again(runtime, device)


async def test_two_ids_of_one_content_live_apart(autojump_clock: object, folder: Path) -> None:
    """Unmounting one leaves the other, and the device's copy, alone."""
    path = write_adapter(folder / "sql")
    async with company() as (runtime, device):
        info = await runtime.mount_adapter("a", path)
        await runtime.mount_adapter("b", path)
        await runtime.unmount_adapter("a")
        assert set(device.mounted) == {info.revision}
        await served(runtime, 1, 2, adapters=("b",))
        await runtime.unmount_adapter("b")
        assert device.mounted == {}
        await runtime.mount_adapter("b", path)
        await runtime.mount_adapter("b", path)
        assert set(device.mounted) == {info.revision}


async def test_a_full_mailbox_refuses(autojump_clock: object, folder: Path) -> None:
    """More asks than may wait are a 429; those that wait are answered."""
    path = write_adapter(folder / "sql")
    refused: list[Overloaded] = []

    async def mount(runtime: Runtime, i: int) -> None:
        try:
            await runtime.mount_adapter(f"a{i}", path)
        except Overloaded as error:
            refused.append(error)

    async with company() as (runtime, _):
        async with trio.open_nursery() as nursery:
            for i in range(ASKS + 5):
                nursery.start_soon(mount, runtime, i)
        assert refused
        assert len(runtime.adapters) == ASKS + 5 - len(refused) >= ASKS


async def test_no_more_than_a_bound_is_mounted(
    autojump_clock: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may mount, and each costs memory; replacing is always possible."""
    monkeypatch.setattr("mlx_troupe.runtime.adapter_table.MAX_MOUNTED", 2)
    path = write_adapter(folder / "sql")
    async with company() as (runtime, _):
        for adapter_id in ("a", "b", "a"):
            await runtime.mount_adapter(adapter_id, path)
        with pytest.raises(AdapterError, match="unmount one"):
            await runtime.mount_adapter("c", path)


# ---- crashes ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["put", "remove", "freed", "check_room"])
async def test_a_crash_of_the_actor_answers_its_clients_and_forgets_nothing(
    autojump_clock: object, folder: Path, method: str, after: bool
) -> None:
    """Rows go on, the table stands, and no revision is left on the device that no id names."""
    first, second = write_adapter(folder / "1", 1), write_adapter(folder / "2", 2)
    async with company() as (runtime, device), trio.open_nursery() as nursery:
        await runtime.mount_adapter("keep", first)
        crowd = Clients(runtime, nursery, adapters=("keep",))
        crowd.start(4)
        await trio.sleep(0.5)
        crashed = crash_once(runtime.cast.adapters.table, method, after=after)
        answers: list[object] = []

        async def tell(call: Any, *args: Any) -> None:
            try:
                answers.append(await call(*args))
            except (Unavailable, AdapterError) as error:
                answers.append(error)

        nursery.start_soon(tell, runtime.mount_adapter, "new", second)
        await until(lambda: answers)
        nursery.start_soon(tell, runtime.unmount_adapter, "new")
        await until(lambda: len(answers) == 2)
        await until(crashed)
        await until(lambda: runtime.cast.supervisor.crashes["adapters"] == 1)
        await trio.sleep(1)
        assert any(isinstance(answer, Unavailable) for answer in answers) or method == "freed"
        named = {info.revision for info in runtime.adapters}
        assert set(device.mounted) == named >= {revision_of(first)}
        await until(lambda: crowd.all_ended)
        assert crowd.errors() == []
        info = await runtime.mount_adapter("new", second)
        await served(runtime, 1, 2, adapters=("new", "keep"))
        assert {i.id for i in runtime.adapters} == {"keep", "new"}
        assert set(device.mounted) == {revision_of(first), info.revision}
        await settle(runtime)
        assert runtime.health().status == "ok"


@pytest.mark.parametrize("changed", [False, True])
async def test_a_device_that_is_loaded_again_has_its_adapters_before_any_row(
    autojump_clock: object, folder: Path, changed: bool
) -> None:
    """What was mounted at start or later is there; content that changed meanwhile is new."""
    a, b = write_adapter(folder / "a", 1), write_adapter(folder / "b", 2)
    device = ScriptedDevice(open_seconds=5.0)
    async with company(device, adapters=(a,)) as (runtime, _), trio.open_nursery() as nursery:
        await runtime.mount_adapter("b", b)
        crowd = Clients(runtime, nursery, adapters=("a", "b"))
        crowd.start(8)
        await trio.sleep(0.5)
        if changed:
            write_adapter(b, 3)
        device.fail_on, device.fail_next = "settle", Injected("lost")
        await until(lambda: crowd.all_ended)
        assert len(crowd.errors()) == 4
        assert device.opened == 2
        assert [info.revision for info in runtime.adapters] == [revision_of(a), revision_of(b)]
        assert starts(device)[-1].adapters == (revision_of(a), revision_of(b))
        await works_again(runtime, device)


async def test_an_adapter_that_is_gone_when_the_device_returns_is_left_out(
    autojump_clock: object, folder: Path
) -> None:
    """The server goes on without it; requests that name it are told."""
    a, b = write_adapter(folder / "a", 1), write_adapter(folder / "b", 2)
    async with company(adapters=(a,)) as (runtime, device):
        await runtime.mount_adapter("b", b)
        (a / "adapter_config.json").unlink()
        device.fail_on, device.fail_next = "launch", Injected("lost")
        await run(runtime, ask(1, 2))
        await runtime.wait_ready()
        assert [info.id for info in runtime.adapters] == ["b"]
        with pytest.raises(AdapterError, match="'a'"):
            await run(runtime, ask(1, 2, adapters=("a",)))
        await served(runtime, 1, 2, adapters=("b",))
        await works_again(runtime, device)


async def test_a_device_lost_in_the_middle_of_a_mount_answers_it(
    autojump_clock: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client hears of it, nothing is mounted, and the next try works."""
    path = write_adapter(folder / "sql")
    async with company() as (runtime, device):
        crashed = crash_once(device, "mount")
        with pytest.raises(Unavailable):
            await runtime.mount_adapter("sql", path)
        assert crashed()
        info = await runtime.mount_adapter("sql", path)
        assert device.opened == 2
        assert set(device.mounted) == {info.revision}


async def test_a_device_lost_in_the_middle_of_an_unmount_comes_back_without_it(
    autojump_clock: object, folder: Path
) -> None:
    """It is gone from the table before the device is asked."""
    path = write_adapter(folder / "sql")
    async with company() as (runtime, device):
        await runtime.mount_adapter("sql", path)
        crash_once(device, "unmount")
        assert await runtime.unmount_adapter("sql") == 1
        await runtime.wait_ready()
        assert (device.opened, device.mounted) == (2, {})
        with pytest.raises(AdapterError):
            await run(runtime, ask(1, 2, adapters=("sql",)))


async def test_many_swaps_among_many_clients_leave_nothing_behind(
    autojump_clock: object, folder: Path
) -> None:
    """Whoever starts when: each row has one revision for weights and state, and its right text."""
    paths = [write_adapter(folder / str(seed), seed) for seed in range(3)]
    async with company(batch=8, queue=64) as (runtime, device):
        await runtime.mount_adapter("a", paths[0])
        await runtime.mount_adapter("b", paths[1])

        async def client(i: int) -> None:
            await trio.sleep(0.02 * i)
            selection = [(), ("a",), ("a", "b"), ("b", "a")][i % 4]
            await served(runtime, *PROMPT[: 60 + i % 3], adapters=selection)

        async with trio.open_nursery() as nursery:
            for i in range(40):
                nursery.start_soon(client, i)
            for i in range(20):
                await trio.sleep(0.04)
                await runtime.mount_adapter("ab"[i % 2], paths[i % 3])
        await settle(runtime)
        nothing_left(runtime, device)
        assert set(device.mounted) == {info.revision for info in runtime.adapters}


# ---- the library --------------------------------------------------------------------------


def test_the_blocking_twin_mounts_lists_and_unmounts(folder: Path) -> None:
    """From a thread without a loop."""
    path = write_adapter(folder / "sql")
    with open_blocking_runtime(
        SETTINGS, device=ScriptedDevice(), tokenizer=ByteTokenizer()
    ) as runtime:
        info = runtime.mount_adapter("sql", path)
        assert runtime.adapters() == (info,)
        assert runtime.unmount_adapter("sql") == 1
        assert runtime.adapters() == ()
