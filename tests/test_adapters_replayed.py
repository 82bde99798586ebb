"""Decode steps with adapters that are traced once and replayed, as on a GPU."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapter_rig import Desk, Folders, desks, settled_memory, summed
from lora_rig import with_adapter
from ragged_rig import assert_equal
from tiny import load_oracle

from mlx_troupe.runtime.engine import compiled as compiled_module
from mlx_troupe.runtime.engine.adapter_stacks import Stacks
from mlx_troupe.runtime.engine.adapter_views import Mixture

pytestmark = pytest.mark.mlx

DENSE = ["llama", "untied", "tied", "4-bit", "sliding"]
EXPERTS = ["experts", "4-bit experts"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def desk(folders: Folders) -> Iterator[Callable[[str], Desk]]:
    with desks(folders, replayed=True) as start:
        yield start


def mounted(one: Desk, folders: Folders, name: str, letters: str) -> dict[str, str]:
    """Revisions by letter."""
    return {letter: one.mount(folders.adapter(name, letter)) for letter in letters}


def patterns(one: Desk) -> list[str]:
    """Of the traces that are kept."""
    return [shape.pattern for shape in one.compiled._traces]


@pytest.mark.parametrize("name", DENSE + EXPERTS)
def test_replayed_rows_equal_solo_rows(
    desk: Callable[[str], Desk], folders: Folders, name: str
) -> None:
    """Three adapters of different rank and scale, and rows without: each row is as it is alone."""
    one = desk(name)
    ids = mounted(one, folders, name, "abc")
    rows = {1: "a", 2: "", 3: "b", 4: "c", 5: "a", 6: ""}
    one.start({row: tuple(ids[letter] for letter in letters) for row, letters in rows.items()})
    one.decode(8, *rows)
    assert not one.failed
    assert one.replays == 7
    for row, letters in rows.items():
        alone = load_oracle(folders.checkpoint(name))
        if letters:
            alone = with_adapter(folders.checkpoint(name), folders.adapter(name, letters))
        one.compare(row, alone)


@pytest.mark.parametrize("name", ["llama", "tied", "experts"])
def test_a_replayed_step_is_the_step_that_is_not(folders: Folders, name: str) -> None:
    """The same rows on a device that replays and on one that does not: the same logits and ids."""
    runs: list[Desk] = []
    for replays in (False, True):
        one = Desk(folders.checkpoint(name))
        if replays:
            one.replay()
        ids = mounted(one, folders, name, "ab")
        one.start({1: (ids["a"],), 2: (), 3: (ids["b"],), 4: (ids["b"], ids["a"])})
        one.decode(8, 1, 2, 3, 4)
        assert one.replays == (7 if replays else 0)
        runs.append(one)
    for row in (1, 2, 3, 4):
        assert runs[0].tokens[row] == runs[1].tokens[row]
        assert_equal(mx.stack(runs[1].logits[row]), mx.stack(runs[0].logits[row]))
    for one in runs:
        one.device.close()


@pytest.mark.parametrize("name", [*DENSE, "experts"])
def test_base_rows_keep_their_bits(
    desk: Callable[[str], Desk], folders: Folders, name: str
) -> None:
    """The same batch with and without adapters on other rows: base rows' logits are identical."""
    runs: list[Desk] = []
    for mixed in (False, True):
        one = desk(name)
        ids = mounted(one, folders, name, "ab")
        a, b = (ids["a"],), (ids["b"],)
        one.start({1: (), 2: a, 3: b, 4: ()} if mixed else dict.fromkeys((1, 2, 3, 4), ()))
        one.decode(8, 1, 2, 3, 4)
        assert one.replays == 7
        assert [bool(pattern) for pattern in patterns(one)] == [mixed]
        runs.append(one)
    for row in (1, 4):
        pairs = zip(runs[0].logits[row], runs[1].logits[row], strict=True)
        for without, with_others in pairs:
            assert bytes(memoryview(without)) == bytes(memoryview(with_others))
    assert mx.abs(mx.stack(runs[0].logits[2]) - mx.stack(runs[1].logits[2])).max().item() > 0.1


def test_several_adapters_add_up_in_one_row(
    desk: Callable[[str], Desk], folders: Folders, tmp_path: Path
) -> None:
    """Rows of a, a+b, b+c, b+a and a+a beside each other equal one that holds the sum."""
    one = desk("llama")
    ids = mounted(one, folders, "llama", "abc")
    rows = {1: "a", 2: "ab", 3: "bc", 4: "", 5: "ba", 6: "aa"}
    one.start({row: tuple(ids[letter] for letter in letters) for row, letters in rows.items()})
    one.decode(8, *rows)
    assert one.replays == 7
    checkpoint = folders.checkpoint("llama")
    for row, letters in rows.items():
        oracle = load_oracle(checkpoint)
        if letters:
            parts = (folders.adapter("llama", letter) for letter in letters)
            oracle = with_adapter(checkpoint, summed(tmp_path / f"{row}", *parts))
        one.compare(row, oracle)


def test_adapters_of_different_layers_share_a_trace(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Siblings of one fused product that only some adapters change, and layers that few do."""
    one = desk("llama")
    parts = {
        "a": ("self_attn.q_proj", "self_attn.v_proj"),
        "b": ("mlp.up_proj", "self_attn.k_proj"),
        "c": ("mlp.down_proj",),
    }
    paths = [folders.adapter("llama", letter, keys) for letter, keys in parts.items()]
    chains = {row: (one.mount(path),) for row, path in enumerate(paths, 1)}
    one.start({**chains, 4: ()})
    one.decode(6, 1, 2, 3, 4)
    assert one.replays == 5
    for row, path in enumerate(paths, 1):
        one.compare(row, with_adapter(folders.checkpoint("llama"), path))
    one.compare(4, load_oracle(folders.checkpoint("llama")))


def test_rows_come_and_go_in_one_trace(desk: Callable[[str], Desk], folders: Folders) -> None:
    """Another mixture in the same slots, a row less, a row of another adapter: nothing is traced.

    The slot of a row that left is computed on, without anybody's adapter.
    """
    one = desk("llama")
    ids = mounted(one, folders, "llama", "ab")
    a, b = (ids["a"],), (ids["b"],)
    rows: dict[int, tuple[str, ...]] = {1: a, 2: (), 3: b, 4: a, 5: ()}
    one.start(rows)
    one.decode(4, *rows)
    traced = patterns(one)
    one.end(2)
    one.decode(3, 1, 3, 4, 5)
    one.start({6: b})
    one.decode(3, 1, 3, 4, 5, 6)
    one.end(1, 4)
    one.start({7: (), 8: b})
    one.decode(3, 3, 5, 6, 7, 8)
    assert patterns(one) == traced
    assert one.replays == 12
    rows |= {6: b, 7: (), 8: b}
    checkpoint = folders.checkpoint("llama")
    alone: dict[tuple[str, ...], Any] = {(): load_oracle(checkpoint)}
    alone |= {
        chain: with_adapter(checkpoint, folders.adapter("llama", letter))
        for chain, letter in ((a, "a"), (b, "b"))
    }
    for row, chain in rows.items():
        one.compare(row, alone[chain])


def test_adapters_are_swapped_under_load(desk: Callable[[str], Desk], folders: Folders) -> None:
    """Rows under way keep what they started with, later ones get the new weights, by one trace."""
    one = desk("llama")
    folder = {letter: folders.adapter("llama", letter) for letter in "adg"}
    first = one.device.mount("poet", folder["a"]).revision
    one.start({1: (first,), 2: ()})
    one.decode(4, 1, 2)
    traced = patterns(one)
    second = one.device.mount("poet", folder["d"]).revision
    assert one.device.unmount(first) == 15
    one.decode(2, 1, 2)
    one.end(1)
    one.start({3: (second,)})
    one.decode(4, 2, 3)
    third = one.device.mount("poet", folder["g"]).revision
    assert one.device.unmount(second) == 15
    one.start({4: (third,)})
    one.end(3)
    one.decode(4, 2, 4)
    assert patterns(one) == traced
    assert one.replays == 13
    checkpoint = folders.checkpoint("llama")
    for row, letter in ((1, "a"), (3, "d"), (4, "g")):
        one.compare(row, with_adapter(checkpoint, folder[letter]))
    one.compare(2, load_oracle(checkpoint))


@pytest.mark.parametrize("part", ["weights", "shares"])
def test_a_trace_that_keeps_old_adapters_is_caught(
    desk: Callable[[str], Desk], folders: Folders, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The comparison fails when a replay goes on with another step's weights, or with its rows."""
    one = desk("llama")
    ids = mounted(one, folders, "llama", "ad")
    kept: list[list[mx.array]] = []
    honest: Callable[[Mixture], list[mx.array]] = vars(Mixture)["arrays"].fget

    def stale(mixture: Mixture) -> list[mx.array]:
        arrays = honest(mixture)
        kept.append(arrays)
        count = len(mixture._shares)
        if part == "weights":
            return arrays[:count] + kept[0][count:]
        return kept[0][:count] + arrays[count:]

    one.start({1: (ids["a"],), 2: ()})
    monkeypatch.setattr(Mixture, "arrays", property(stale))
    one.decode(3, 1, 2)
    one.compare(1, with_adapter(folders.checkpoint("llama"), folders.adapter("llama", "a")))
    one.end(1)
    one.device.unmount(ids["a"])
    one.start({3: (ids["d"],)})
    one.decode(3, 2, 3)
    alone = with_adapter(folders.checkpoint("llama"), folders.adapter("llama", "d"))
    with pytest.raises(AssertionError, match="differ"):
        one.compare(3, alone)


def test_base_rows_alone_keep_their_own_trace(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Without an adapter in the batch nothing of adapters is computed, whatever is mounted."""
    one = desk("llama")
    ids = mounted(one, folders, "llama", "ab")
    one.start({2: (), 4: ()})
    one.decode(4, 2, 4)
    assert patterns(one) == [""]
    one.start({1: (ids["a"],), 3: (ids["b"],)})
    one.decode(4, 1, 2, 3, 4)
    one.end(1, 3)
    one.decode(4, 2, 4)
    assert [bool(pattern) for pattern in patterns(one)].count(True) == 1
    for row in (2, 4):
        one.compare(row, load_oracle(folders.checkpoint("llama")))


def test_traces_and_memory_go_with_the_last_adapter(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Unmounting all and ending their rows leaves the base rows' traces, and no weight."""
    one = desk("llama")
    one.start({9: (), 10: ()})
    one.decode(3, 9, 10)
    one.end(9, 10)
    before, base = settled_memory(one), patterns(one)
    ids = mounted(one, folders, "llama", "ab")
    loaded = {name: weakref.ref(one.adapters.chain([name])[0]) for name in ids.values()}
    a, b = ids.values()
    one.start({1: (a,), 2: (b,), 3: (), 4: (a,)})
    one.decode(3, 1, 2, 3, 4)
    for revision in ids.values():
        one.device.unmount(revision)
    one.decode(2, 1, 2, 3, 4)
    one.end(1, 4)
    assert loaded[a]() is None
    assert len(patterns(one)) > len(base)
    one.decode(2, 2, 3)
    one.end(2)
    assert loaded[b]() is None
    assert not any(patterns(one))
    one.end(3)
    assert settled_memory(one) <= before


def test_an_unmounted_adapter_without_rows_takes_its_traces_along(
    desk: Callable[[str], Desk], folders: Folders
) -> None:
    """Rows end first, then the adapter goes."""
    one = desk("llama")
    (a,) = mounted(one, folders, "llama", "a").values()
    one.start({1: (a,), 2: ()})
    one.decode(3, 1, 2)
    one.end(1, 2)
    assert any(patterns(one))
    one.device.unmount(a)
    assert patterns(one) == []


def test_many_mixtures_leave_nothing_behind(
    desk: Callable[[str], Desk], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty mixtures of adapters that come and go: few traces, no more of them than the limit.

    Memory at rest is what it was.
    """
    monkeypatch.setattr(compiled_module, "MOST_TRACES", 6)
    one = desk("llama")
    draw, row = random.Random(1), 100
    sizes: list[int] = []
    for _ in range(30):
        letters = draw.sample("abcdeg", 3)
        ids = mounted(one, folders, "llama", "".join(letters))
        rows: dict[int, tuple[str, ...]] = {}
        for _ in range(draw.choice((3, 4, 5))):
            row += 1
            rows[row] = tuple(draw.sample(list(ids.values()), draw.choice((0, 1, 1, 2))))
        one.start(rows, lengths=(5,))
        one.decode(3, *rows)
        one.end(*rows)
        for revision in ids.values():
            one.device.unmount(revision)
        assert len(one.compiled._traces) <= 6
        one.prompts.clear()
        one.tokens.clear()
        sizes.append(settled_memory(one))
    assert not one.failed
    assert one.replays >= 30
    assert max(sizes[15:]) <= max(sizes[:15])


def test_adapters_of_one_kind_have_one_pattern(folders: Folders) -> None:
    """Weights, scales and the order of names do not matter; ranks do, once a power is crossed."""
    model = load_oracle(folders.checkpoint("llama"))
    one = Desk(folders.checkpoint("llama"))
    ids = mounted(one, folders, "llama", "abdf")
    a, b, d, f = (one.adapters.chain([ids[letter]])[0] for letter in "abdf")
    assert (a.info.rank, b.info.rank, d.info.rank, f.info.rank) == (5, 8, 5, 2)
    pattern = Stacks(model, [a]).pattern
    assert Stacks(model, [d]).pattern == pattern == Stacks(model, [d, f]).pattern
    assert Stacks(model, [a, b, d]).pattern != pattern
    one.device.close()
