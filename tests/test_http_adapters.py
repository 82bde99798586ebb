"""``/v1/adapters`` and the fields that choose adapters, on the real company (scripted device)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from company import company, counted, until
from scripted_adapters import QUERY, write_adapter

from mlx_troupe.actors.system import Runtime
from mlx_troupe.actors.testing import ScriptedDevice
from mlx_troupe.http.app import create_app
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.http.testing import MODEL, ScriptedRuntime
from mlx_troupe.http.wire.chat import chat_call
from mlx_troupe.runtime.adapter_fit import AdapterTarget
from mlx_troupe.runtime.errors import AdapterError, InvalidRequest
from mlx_troupe.runtime.store import adapters as shelf
from mlx_troupe.runtime.store.adapters import describe, offered_adapters, offered_folder

ADAPTERS = "/v1/adapters"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    body: Any


@dataclass(frozen=True, slots=True)
class Server:
    """A company behind its HTTP application, without sockets."""

    client: Any
    runtime: Runtime
    device: ScriptedDevice

    async def send(self, method: str, path: str, body: object = None) -> Reply:
        """One request; a body is sent as JSON."""
        more = {} if body is None else {"json": body}
        reply = await self.client.open(path, method=method, **more)
        return Reply(reply.status_code, await reply.get_json())

    async def complete(self, **fields: Any) -> Reply:
        """A completion of five tokens."""
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, **fields}
        return await self.send("POST", COMPLETIONS, body)

    @property
    def last_start(self) -> tuple[str, ...]:
        """Adapter revisions of the row started last."""
        return [start for plan in self.device.plans for start in plan.start][-1].adapters


@asynccontextmanager
async def server(*offered: Path, adapters: tuple[Path, ...] = ()) -> AsyncIterator[Server]:
    """A server whose clients may mount what is under ``offered``."""
    device = ScriptedDevice()
    device.targets = (AdapterTarget(QUERY, "linear", 8, 8),)
    async with company(device, adapters=adapters) as (runtime, _):
        app = create_app(runtime, HttpSettings(port=0, adapter_dirs=offered))
        yield Server(app.test_client(), runtime, device)


# ---- the four routes ----------------------------------------------------------------------


async def test_mount_list_use_and_unmount(tmp_path: Path) -> None:
    """The whole life of an adapter over HTTP."""
    write_adapter(tmp_path / "sql")
    async with server(tmp_path) as s:
        assert (await s.send("GET", ADAPTERS)).body == {"object": "list", "data": []}
        mounted = await s.send("POST", ADAPTERS, {"id": "sql", "path": "sql"})
        assert mounted.status == 200
        revision = mounted.body["revision"]
        assert mounted.body == {
            "id": "sql",
            "revision": revision,
            "mounted_layers": 1,
            "rank": 2,
            "scale": 4.0,
            "size_bytes": mounted.body["size_bytes"],
            "ram_bytes": mounted.body["ram_bytes"],
        }
        assert mounted.body["ram_bytes"] > 0
        listed = (await s.send("GET", ADAPTERS)).body["data"]
        assert listed == [{**mounted.body, "object": "adapter", "default": False}]
        card = (await s.send("GET", "/v1/models")).body["data"][0]
        assert card["adapters"] == ["sql"]
        stats = (await s.send("GET", "/stats")).body["adapters"]
        assert [one["id"] for one in stats["mounted"]] == ["sql"]
        assert str(tmp_path) not in str([mounted, listed, card, stats])
        used = await s.complete(adapter="sql")
        assert used.body["choices"][0]["text"] == counted(3, 5)
        assert s.last_start == (revision,)
        gone = await s.send("DELETE", f"{ADAPTERS}/sql")
        assert (gone.status, gone.body) == (200, {"id": "sql", "removed_layers": 1})
        again = await s.send("DELETE", f"{ADAPTERS}/sql")
        assert (again.status, again.body["error"]["code"]) == (404, "adapter_not_found")
        refused = await s.complete(adapter="sql")
        assert refused.status == 400
        assert refused.body["error"]["param"] == "adapter"
        assert "'sql'" in refused.body["error"]["message"]


async def test_without_an_id_the_folder_names_it(tmp_path: Path) -> None:
    """As on the command line."""
    write_adapter(tmp_path / "team" / "sql")
    async with server(tmp_path) as s:
        mounted = await s.send("POST", ADAPTERS, {"path": "team/sql"})
        assert (mounted.status, mounted.body["id"]) == (200, "sql")


async def test_the_default_and_what_beats_it(tmp_path: Path) -> None:
    """Absent: the adapters given at start. ``none`` and other ids win over them."""
    a, b = write_adapter(tmp_path / "a", 1), write_adapter(tmp_path / "b", 2)
    async with server(tmp_path, adapters=(a,)) as s:
        await s.send("POST", ADAPTERS, {"path": "b"})
        cards = (await s.send("GET", ADAPTERS)).body["data"]
        assert [(card["id"], card["default"]) for card in cards] == [("a", True), ("b", False)]
        first, second = describe(a).revision, describe(b).revision
        for fields, revisions in (
            ({}, (first,)),
            ({"adapter": None}, (first,)),
            ({"adapter": "none"}, ()),
            ({"adapters": []}, ()),
            ({"adapter": "b"}, (second,)),
            ({"adapter": "b+a"}, (second, first)),
            ({"adapter": "a,b"}, (first, second)),
            ({"adapters": ["b", "a"]}, (second, first)),
        ):
            assert (await s.complete(**fields)).status == 200
            assert s.last_start == revisions, fields


async def test_available(tmp_path: Path) -> None:
    """What may be mounted: what is, what fits, and why another does not."""
    write_adapter(tmp_path / "good", 1)
    write_adapter(tmp_path / "other", 2)
    write_adapter(tmp_path / "owner" / "wide", 3, modules={QUERY: (8, 16)})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "adapter_config.json").write_text("{")
    (tmp_path / "not-one").mkdir()
    async with server(tmp_path) as s:
        await s.send("POST", ADAPTERS, {"id": "mine", "path": "good"})
        reply = await s.send("GET", f"{ADAPTERS}/available")
    cards = {card["path"]: card for card in reply.body["data"]}
    assert list(cards) == ["good", "other", "owner/wide", "torn"]
    told = {path: (card["mounted"], card["compatible"]) for path, card in cards.items()}
    assert told == {
        "good": (True, True),
        "other": (False, True),
        "owner/wide": (False, False),
        "torn": (False, False),
    }
    assert (cards["good"]["rank"], cards["good"]["id"]) == (2, "good")
    assert "does not fit" in cards["owner/wide"]["reason"]
    assert str(tmp_path) not in str(reply.body)


async def test_a_bad_folder_is_a_400_that_names_what_the_client_named(tmp_path: Path) -> None:
    """And not where it lies."""
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "adapter_config.json").write_text("{")
    async with server(tmp_path) as s:
        reply = await s.send("POST", ADAPTERS, {"id": "x", "path": "torn"})
        assert (reply.status, reply.body["error"]["code"]) == (400, "invalid_adapter")
        assert "torn" in reply.body["error"]["message"]
        assert str(tmp_path) not in str(reply.body)


async def test_what_does_not_fit_never_reaches_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has rows to compute."""
    write_adapter(tmp_path / "wide", modules={QUERY: (8, 16)})
    asked: list[str] = []
    async with server(tmp_path) as s:
        monkeypatch.setattr(s.device, "mount", lambda name, _: asked.append(name))
        reply = await s.send("POST", ADAPTERS, {"path": "wide"})
    assert (reply.status, asked) == (400, [])
    assert "does not fit" in reply.body["error"]["message"]
    assert str(tmp_path) not in str(reply.body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "path"),
        ({"path": "."}, "path"),
        ({"path": ""}, "path"),
        ({"path": 7}, "path"),
        ({"id": 7, "path": "sql"}, "id"),
        ({"id": "../sql", "path": "sql"}, "id"),
        ({"id": "a/b", "path": "sql"}, "id"),
        ({"id": "none", "path": "sql"}, "id"),
        ({"id": "..", "path": "sql"}, "id"),
        ({"id": "a b", "path": "sql"}, "id"),
        ({"id": "a+b", "path": "sql"}, "id"),
        ({"id": "é", "path": "sql"}, "id"),
    ],
)
async def test_a_bad_body_is_a_400(tmp_path: Path, body: object, param: str) -> None:
    """By name, and nothing is mounted."""
    write_adapter(tmp_path / "sql")
    async with server(tmp_path) as s:
        reply = await s.send("POST", ADAPTERS, body)
        assert (reply.status, reply.body["error"]["param"]) == (400, param)
        assert not s.device.mounted


async def test_mounting_needs_json_and_an_allowed_host(tmp_path: Path) -> None:
    """A foreign page can neither mount nor unmount."""
    write_adapter(tmp_path / "sql")
    async with server(tmp_path) as s:
        await s.send("POST", ADAPTERS, {"path": "sql"})
        foreign = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        reply = await s.client.post(ADAPTERS, data=b'{"path":"sql"}', headers=foreign)
        assert reply.status_code == 415
        reply = await s.client.delete(f"{ADAPTERS}/sql", headers={"Host": "evil.example"})
        assert reply.status_code == 403
        assert len(s.device.mounted) == 1


async def test_while_the_model_loads(tmp_path: Path) -> None:
    """Lists answer; whether a folder fits is not known yet."""
    write_adapter(tmp_path / "sql")
    app = create_app(ScriptedRuntime(model=None), HttpSettings(adapter_dirs=(tmp_path,)))
    client = app.test_client()
    assert (await (await client.get(ADAPTERS)).get_json())["data"] == []
    card = (await (await client.get(f"{ADAPTERS}/available")).get_json())["data"][0]
    assert (card["id"], card["compatible"]) == ("sql", None)


async def test_a_row_that_waits_for_an_unmounted_adapter_is_a_400(tmp_path: Path) -> None:
    """Also when it was there as the request came."""
    write_adapter(tmp_path / "sql")
    async with server(tmp_path) as s:
        await s.send("POST", ADAPTERS, {"path": "sql"})
        late: list[Reply] = []

        async def wait() -> None:
            late.append(await s.complete(adapter="sql"))

        async with trio.open_nursery() as nursery:
            for start in range(4):
                nursery.start_soon(partial(s.complete, prompt=[5 + start], max_tokens=30))
            await until(lambda: len(s.device.rows) == 4)
            nursery.start_soon(wait)
            await until(lambda: s.runtime.cast.scheduler.core.stats().waiting_rows)
            await s.send("DELETE", f"{ADAPTERS}/sql")
        assert (late[0].status, late[0].body["error"]["param"]) == (400, "adapter")


# ---- paths from the network ---------------------------------------------------------------


@pytest.fixture
def offered(tmp_path: Path) -> Path:
    """A directory that is offered, beside things that are not."""
    inside = tmp_path / "offered"
    write_adapter(inside / "good")
    write_adapter(tmp_path / "secret")
    write_adapter(tmp_path / "offered-too")
    (inside / "escape").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    (inside / "alias").symlink_to(inside / "good")
    return inside


def escapes(offered: Path) -> list[str]:
    """Names that lead out of the offered directory, or nowhere."""
    secret = offered.parent / "secret"
    return [
        "../secret",
        "good/../../secret",
        "./../secret/.",
        "good/../../offered/../secret",
        str(secret),
        f"{offered}/../secret",
        f"{offered}-too",
        "../offered-too",
        "escape",
        "up/secret",
        "loop",
        "good/adapters.safetensors",
        "nothing",
        "/",
        "/etc",
        "~",
        "~root",
        "..",
        "good\0/../../secret",
        "a" * 5000,
        "a/" * 2000,
        "..\\secret",
        "%2e%2e/secret",
        "file:///etc",
        "\ud800",
    ]


def test_no_name_leads_out_of_the_offered_directory(offered: Path) -> None:
    """Dots, links, absolute paths, homes, NULs: all answered alike, as if there were nothing."""
    replies = set()
    for name in escapes(offered):
        with pytest.raises(AdapterError) as caught:
            offered_folder(name, (offered,))
        assert caught.value.param == "path"
        replies.add(caught.value.message.replace(repr(name[:256]), "NAME"))
    assert len(replies) == 1


async def test_no_escape_mounts_anything(offered: Path) -> None:
    """The same over HTTP: always a 400, and the device is never asked."""
    async with server(offered) as s:
        for name in escapes(offered):
            reply = await s.send("POST", ADAPTERS, {"id": "x", "path": name})
            assert reply.status == 400, name
        assert not s.device.mounted
        assert (await s.send("GET", ADAPTERS)).body["data"] == []


def test_what_lies_inside_is_found_by_every_honest_name(offered: Path) -> None:
    """Relative, in full, through a link that stays inside, and the directory by its own name."""
    good = (offered / "good").resolve()
    for name in ("good", "./good", "good/", str(offered / "good"), "alias", "good/../good"):
        assert offered_folder(name, (offered,)) == good
    assert offered_folder("good", (offered / "good",)) == good
    assert offered_folder(str(good), (offered / "good",)) == good
    linked = offered.parent / "linked"
    linked.symlink_to(offered)
    assert offered_folder("good", (linked,)) == good
    with pytest.raises(AdapterError):
        offered_folder("good", (offered.parent / "missing",))


def test_a_listing_stays_inside_and_is_bounded(
    offered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links out are not followed, loops end, and neither number nor depth is without limit."""
    assert [one.name for one in offered_adapters((offered,))] == ["good"]
    deep = offered.parent / "deep"
    write_adapter(deep / "a" / "b" / "c" / "d")
    write_adapter(deep / "a" / "b")
    (deep / "a" / "again").symlink_to(deep)
    assert [one.name for one in offered_adapters((deep,))] == ["a/b"]
    assert [one.name for one in offered_adapters((deep / "a" / "b",))] == ["b", "c/d"]
    many = offered.parent / "many"
    for i in range(6):
        write_adapter(many / f"n{i}")
    monkeypatch.setattr(shelf, "MAX_OFFERED", 4)
    assert len(offered_adapters((many,))) == 4
    monkeypatch.setattr(shelf, "MAX_LOOKED_AT", 3)
    assert len(offered_adapters((many,))) == 2
    assert offered_adapters((offered.parent / "missing",)) == ()


def test_a_description_follows_the_files(tmp_path: Path) -> None:
    """It is read once, and again when they change."""
    path = write_adapter(tmp_path / "sql", 1)
    first = describe(path)
    assert describe(path) is first
    write_adapter(path, 2)
    os.utime(path / "adapters.safetensors", ns=(1, 1))
    assert describe(path).revision != first.revision
    with pytest.raises(AdapterError):
        describe(tmp_path / "missing")


# ---- the fields ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, None),
        ({"adapter": None, "adapters": None}, None),
        ({"adapter": "none"}, ()),
        ({"adapters": "none"}, ()),
        ({"adapters": ["none"]}, ()),
        ({"adapters": []}, ()),
        ({"adapter": "a"}, ("a",)),
        ({"adapter": " a + b "}, ("a", "b")),
        ({"adapter": "b,a"}, ("b", "a")),
        ({"adapters": ["a", "b"]}, ("a", "b")),
        ({"adapters": "a+b"}, ("a", "b")),
        ({"adapter": "a+b", "adapters": ["a", "b"]}, ("a", "b")),
        ({"adapters": "/no/such"}, ("/no/such",)),
    ],
)
def test_how_a_request_names_adapters(fields: dict[str, Any], ids: tuple[str, ...] | None) -> None:
    """In one string or a list, in order; absent is not the same as none."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert chat_call(body, MODEL).request.adapters == ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"adapter": ""}, "adapter"),
        ({"adapter": "a++b"}, "adapter"),
        ({"adapter": "+"}, "adapter"),
        ({"adapter": "a+none"}, "adapter"),
        ({"adapter": 7}, "adapter"),
        ({"adapter": ["a"]}, "adapter"),
        ({"adapters": ["a", ""]}, "adapters"),
        ({"adapters": ["none", "a"]}, "adapters"),
        ({"adapters": [7]}, "adapters[0]"),
        ({"adapters": {"a": 1}}, "adapters"),
        ({"adapter": "a", "adapters": ["b"]}, "adapter"),
        ({"adapter": "none", "adapters": ["b"]}, "adapter"),
    ],
)
def test_what_names_no_adapter_is_refused(fields: dict[str, Any], param: str) -> None:
    """By the field's name."""
    with pytest.raises(InvalidRequest) as caught:
        chat_call({"messages": [{"role": "user", "content": "hi"}], **fields}, MODEL)
    assert caught.value.param == param
