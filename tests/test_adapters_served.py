"""Adapters over HTTP with a real tiny model: each answer is mlx-lm's with that adapter alone."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from company import WordTokenizer
from lora_rig import make_mlx_adapter, with_adapter
from mlx_lm.generate import generate_step
from tiny import EOS, make_checkpoint, prompt

from mlx_troupe.actors.gpu import ModelRefused
from mlx_troupe.actors.system import Runtime, open_runtime
from mlx_troupe.http.app import create_app
from mlx_troupe.http.cli.errors import leaves
from mlx_troupe.http.seams import HttpSettings
from mlx_troupe.runtime.settings import Settings

pytestmark = pytest.mark.mlx

TOKENS = 12
PROMPTS = [prompt(length, seed) for seed, length in enumerate((40, 7, 61, 23))]
SELECTIONS = ("none", "a", "b", "c", "a+c")
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class TinyTokenizer(WordTokenizer):
    """Words for ids, with the tiny models' own end token."""

    eos_ids = frozenset({EOS})

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


@dataclass(frozen=True, slots=True)
class World:
    """A checkpoint, adapters for it, and what mlx-lm alone says with each."""

    checkpoint: Path
    adapters: Path
    wanted: dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """``a`` and ``b`` change the same modules, ``c`` others; ``a2`` is another ``a``."""
    root = tmp_path_factory.mktemp("adapters")
    checkpoint = make_checkpoint(root / "model")
    folder = root / "offered"
    for seed, (name, keys) in enumerate(
        {"a": ATTENTION, "b": ATTENTION, "c": MLP, "a2": ATTENTION}.items(), 1
    ):
        make_mlx_adapter(folder / name, checkpoint, seed=seed, keys=keys)
    wanted: dict[tuple[str, int], list[int]] = {}
    for selection in (*SELECTIONS, "a2"):
        names = [] if selection == "none" else selection.split("+")
        model = with_adapter(checkpoint, *(folder / name for name in names))
        for i, ids in enumerate(PROMPTS):
            wanted[selection, i] = alone(model, ids)
    return World(checkpoint, folder, wanted)


def alone(model: Any, ids: Sequence[int]) -> list[int]:
    """Greedy ids of one row, up to an end token."""
    said: list[int] = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS):
        if token == EOS:
            break
        said.append(int(token))
    return said


class Client:
    """Talks to a served runtime."""

    def __init__(self, runtime: Runtime, app: Any) -> None:
        self.runtime = runtime
        self._client = app.test_client()

    async def send(self, method: str, path: str, body: object = None) -> Any:
        """The JSON of a reply that must be a 200."""
        more = {} if body is None else {"json": body}
        reply = await self._client.open(path, method=method, **more)
        answer = await reply.get_json()
        assert reply.status_code == 200, answer
        return answer

    async def ids(self, i: int, selection: str | None) -> list[int]:
        """What the server says to prompt ``i`` with these adapters."""
        body: dict[str, Any] = {
            "prompt": list(PROMPTS[i]),
            "max_tokens": TOKENS,
            "temperature": 0,
            "adapter": selection,
        }
        answer = await self.send("POST", "/v1/completions", body)
        return [int(word) for word in answer["choices"][0]["text"].split()]


@asynccontextmanager
async def served(world: World, *at_start: str, **changes: Any) -> AsyncIterator[Client]:
    """A server on the tiny model."""
    adapters = tuple(world.adapters / name for name in at_start)
    settings = Settings(world.checkpoint, "tiny", batch=8, adapters=adapters, **changes)
    async with open_runtime(settings, tokenizer=TinyTokenizer()) as runtime:
        http = HttpSettings(port=0, adapter_dirs=(world.adapters,))
        yield Client(runtime, create_app(runtime, http))


async def test_each_answer_is_that_of_its_adapter_alone(world: World) -> None:
    """One at a time, then all at once in one batch, with prefixes kept in between."""
    assert len({tuple(world.wanted[s, 0]) for s in (*SELECTIONS, "a2")}) == 6
    async with served(world) as client:
        for name in "abc":
            info = await client.send("POST", "/v1/adapters", {"path": name})
            assert info["ram_bytes"] > 0
        for selection in SELECTIONS:
            assert await client.ids(0, selection) == world.wanted[selection, 0], selection
        asked = [(s, i) for s in SELECTIONS for i in range(len(PROMPTS))] * 2
        random.Random(5).shuffle(asked)
        answers: list[tuple[tuple[str, int], list[int]]] = []

        async def ask(key: tuple[str, int]) -> None:
            answers.append((key, await client.ids(key[1], key[0])))

        async with trio.open_nursery() as nursery:
            for key in asked:
                nursery.start_soon(ask, key)
        assert len(answers) == len(asked)
        for key, ids in answers:
            assert ids == world.wanted[key], key
        available = await client.send("GET", "/v1/adapters/available")
        assert [
            (card["id"], card["mounted"], card["compatible"]) for card in available["data"]
        ] == [
            ("a", True, True),
            ("a2", False, True),
            ("b", True, True),
            ("c", True, True),
        ]


async def test_a_swap_under_load_drops_nothing_and_mixes_nothing(world: World) -> None:
    """Every answer is wholly that of one revision; after the swap only the new one is used."""
    async with served(world) as client:
        await client.send("POST", "/v1/adapters", {"path": "a"})
        answers: list[list[int]] = []
        first = trio.Event()

        async def ask() -> None:
            answers.append(await client.ids(0, "a"))
            first.set()

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)
            await first.wait()
            await client.send("POST", "/v1/adapters", {"id": "a", "path": "a2"})
        old, new = world.wanted["a", 0], world.wanted["a2", 0]
        assert len(answers) == 20
        assert all(ids in (old, new) for ids in answers)
        assert old in answers
        assert await client.ids(0, "a") == new
        assert await client.ids(0, "none") == world.wanted["none", 0]
        assert (await client.send("DELETE", "/v1/adapters/a"))["removed_layers"] > 0


async def test_the_adapter_given_at_start_is_the_default(world: World) -> None:
    """Asked without the field its effect is there; ``none`` is the base model."""
    async with served(world, "b") as client:
        assert await client.ids(1, None) == world.wanted["b", 1]
        assert await client.ids(1, "none") == world.wanted["none", 1]


async def test_an_adapter_of_another_model_fails_the_start(world: World, tmp_path: Path) -> None:
    """By name, and with what does not fit."""
    other = make_checkpoint(tmp_path / "other", hidden_size=32, intermediate_size=48)
    make_mlx_adapter(world.adapters.parent / "alien", other)
    with pytest.RaisesGroup(ModelRefused, flatten_subgroups=True) as caught:
        async with served(world, "../alien"):
            await trio.sleep_forever()
    told = " ".join(map(str, leaves(caught.value)))
    assert "alien" in told
    assert "does not fit" in told
