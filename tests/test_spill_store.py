"""The SSD store: what is saved comes back, what is not wanted goes, and the cap holds."""

from __future__ import annotations

import re
import stat as modes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from spill_rig import (
    NAMESPACE,
    Ticks,
    entry,
    entry_files,
    faults,
    folder_bytes,
    opened,
    state,
)

from mlx_troupe.runtime.spill.faults import Absent, SpillFault, TooLarge, Unfit
from mlx_troupe.runtime.spill.files import Files
from mlx_troupe.runtime.spill.header import Header
from mlx_troupe.runtime.spill.index import Near
from mlx_troupe.runtime.spill.state import HostArray, HostLayer, HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore, key_of


def test_a_saved_state_comes_back_to_the_byte_after_a_restart(tmp_path: Path) -> None:
    """Arrays, kinds, plain values, ids and flags survive the process."""
    made = entry(5, 6, 7, cuttable=False)
    written = opened(tmp_path, files=Files()).save(made, state(made, recurrent=True))
    store = opened(tmp_path)
    hit = store.lookup((5, 6, 7, 8), NAMESPACE)
    assert hit is not None
    assert (hit.key, hit.length, hit.state_length) == (made.key, 3, 3)
    found = store.load(hit.key)
    assert found.state == state(made, recurrent=True)
    assert (found.ids, found.kind, found.cuttable) == (made.ids, made.kind, False)
    assert found.read_bytes == written == folder_bytes(tmp_path)


def test_every_type_of_array_comes_back(tmp_path: Path) -> None:
    """All of MLX's types, arrays without items, and layers without arrays."""
    arrays = [
        HostArray(dtype, (2,), bytes(range(2 * size)))
        for dtype, size in (("bool", 1), ("uint8", 1), ("int8", 1), ("uint16", 2), ("int16", 2))
    ]
    arrays += [
        HostArray(dtype, (1,), bytes(range(size)))
        for dtype, size in (
            ("float16", 2),
            ("bfloat16", 2),
            ("uint32", 4),
            ("int32", 4),
            ("float32", 4),
            ("uint64", 8),
            ("int64", 8),
            ("float64", 8),
            ("complex64", 8),
        )
    ]
    arrays += [HostArray("float32", (0, 3), b""), HostArray("float32", (), b"1234")]
    layer = HostLayer("all", (), tuple(arrays), (None,) * len(arrays))
    whole = HostState(2, (layer, HostLayer("none", (("n", 1),), (), ())))
    store = opened(tmp_path)
    store.save(entry(1, 2), whole)
    assert store.load(entry(1, 2).key).state == whole


def test_a_file_is_a_safetensors_file_that_others_can_read(tmp_path: Path) -> None:
    """The common library finds the tensors under their layers' numbers."""
    made = entry(5, 6, 7)
    opened(tmp_path).save(made, state(made))
    (path,) = entry_files(tmp_path)
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["layers.0.0", "layers.0.1"]
        assert file.get_slice("layers.0.1").get_dtype() == "BF16"
        assert file.metadata()["length"] == "3"
        keys = file.get_tensor("layers.0.0")
    expected = np.frombuffer(state(made).layers[0].arrays[0].data, np.float32)
    assert np.array_equal(keys.ravel(), expected)
    assert keys.shape == (1, 2, 3, 4)


def test_folder_and_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """0700 and 0600, and neither the namespace nor a text lies in a file."""
    folder = tmp_path / "a" / "b"
    made = entry(5, 6, 7, namespace="/home/somebody/model")
    opened(folder).save(made, state(made))
    (path,) = entry_files(folder)
    assert modes.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes.S_IMODE(path.stat().st_mode) == 0o600
    assert b"somebody" not in path.read_bytes()
    assert re.fullmatch(r"[0-9a-f]{40}", path.stem)


def test_a_chain_of_deltas_is_joined(tmp_path: Path) -> None:
    """Each delta holds only its own tokens on disk; a load gives the whole state."""
    ids = tuple(range(100, 124))
    store = opened(tmp_path)
    sizes = []
    for first, last in ((0, 8), (8, 11), (11, 20), (20, 24)):
        part = entry(*ids[:last])
        sizes.append(store.save(part, state(part, first, recurrent=True)))
    store = opened(tmp_path)
    store.check_integrity()
    for last in (8, 11, 20, 24):
        part = entry(*ids[:last])
        assert store.load(part.key).state == state(part, recurrent=True)
    assert sizes[1] < sizes[0]
    assert store.load(entry(*ids).key).read_bytes == sum(sizes)


def test_a_load_reads_no_more_of_a_chain_than_asked_for(tmp_path: Path) -> None:
    """With ``upto`` the deltas behind the tokens that are of use stay on disk."""
    ids = tuple(range(100, 124))
    store = opened(tmp_path)
    for first, last in ((0, 8), (8, 16), (16, 24)):
        part = entry(*ids[:last])
        store.save(part, state(part, first))
    for upto, length in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 24), (24, 24)):
        found = store.load(entry(*ids).key, upto=upto)
        assert found.ids == ids[:length]
        assert found.state == state(entry(*ids[:length]))


@pytest.mark.parametrize("lone", [True, False])
def test_a_delta_without_its_parent_is_refused(tmp_path: Path, lone: bool) -> None:
    """What a delta continues must be on disk, and be of the same form."""
    store = opened(tmp_path)
    if not lone:
        parent = entry(1, 2)
        store.save(parent, state(parent, recurrent=True))
    child = entry(1, 2, 3)
    with pytest.raises(Unfit):
        store.save(child, state(child, 2))
    assert faults(store) == {"unfit": 1}
    assert not store.has(child.key)
    assert len(entry_files(tmp_path)) == int(not lone)


def test_a_state_of_another_length_than_its_ids_is_refused(tmp_path: Path) -> None:
    """A state is never filed under tokens that it does not hold."""
    store = opened(tmp_path)
    with pytest.raises(Unfit):
        store.save(entry(1, 2, 3), state(entry(1, 2)))
    assert not entry_files(tmp_path)


def test_saving_what_is_there_writes_nothing(tmp_path: Path) -> None:
    """The same ids in the same namespace are the same state; it counts as used."""
    store = opened(tmp_path, max_bytes=None)
    first, second = entry(1, 2), entry(3, 4)
    size = store.save(first, state(first))
    store.save(second, state(second))
    before = entry_files(tmp_path)[0].read_bytes()
    assert store.save(first, state(first)) == 0
    assert store.stats().bytes_written == 2 * size
    assert entry_files(tmp_path)[-1].read_bytes() == before


def test_namespaces_do_not_mix(tmp_path: Path) -> None:
    """The same ids under another namespace are another state."""
    store = opened(tmp_path)
    one, two = entry(1, 2, namespace="one"), entry(1, 2, namespace="two")
    store.save(one, state(one))
    assert store.lookup((1, 2, 3), "two") is None
    store.save(two, state(two))
    for made in (one, two):
        hit = store.lookup((1, 2, 3), made.namespace)
        assert hit is not None
        assert store.load(hit.key).state == state(made)


def test_the_longest_usable_prefix_is_found(tmp_path: Path) -> None:
    """Cuttable states serve where ids part; others only as they are; never the last id."""
    store = opened(tmp_path)
    long, short = entry(1, 2, 3, 4), entry(1, 2, cuttable=False)
    store.save(long, state(long))
    assert store.lookup((1, 2, 3, 9, 9), NAMESPACE).length == 3
    assert store.lookup((1, 2, 3, 4), NAMESPACE).length == 3
    assert store.lookup((1, 2, 3, 4), NAMESPACE, trim_floor=4) is None
    assert store.lookup((9, 2), NAMESPACE) is None
    store.save(short, state(short))
    assert store.lookup((1, 2, 5), NAMESPACE).key == short.key
    store.drop(long.key)
    assert store.lookup((1, 2, 3, 4), NAMESPACE).length == 2
    assert store.lookup((1, 2), NAMESPACE) is None
    stats = store.stats()
    assert (stats.hits, stats.misses) == (4, 3)


def test_the_cap_holds_at_every_moment_and_the_oldest_go(tmp_path: Path) -> None:
    """Before a file is written the least recently used make room for it."""
    made = [entry(n, n + 1, n + 2) for n in range(0, 60, 3)]
    size = opened(tmp_path / "one").save(made[0], state(made[0]))
    cap = 5 * size + size // 2
    seen = []

    class Watching(Files):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            seen.append(folder_bytes(old.parent))

    store = opened(tmp_path / "two", max_bytes=cap, files=Watching())
    for index, each in enumerate(made):
        store.save(each, state(each))
        if index == 7:
            store.load(made[3].key)
        store.check_integrity()
    assert max(seen) <= cap
    kept = [each for each in made if store.has(each.key)]
    assert kept == made[-5:]
    assert store.stats().evictions == 15
    assert store.stats().bytes == folder_bytes(tmp_path / "two") <= cap


def test_a_load_keeps_a_state_from_going_first(tmp_path: Path) -> None:
    """Recency is by use, also after a restart."""
    made = [entry(n, n + 1) for n in range(0, 8, 2)]
    clock = Ticks()
    store = opened(tmp_path, clock=clock)
    sizes = [store.save(each, state(each)) for each in made[:3]]
    store.load(made[0].key)
    store = opened(tmp_path, max_bytes=sum(sizes), clock=clock)
    store.save(made[3], state(made[3]))
    assert [store.has(each.key) for each in made] == [True, False, True, True]


@pytest.mark.parametrize("other", ["b", None])
def test_closing_a_chat_takes_nothing_that_another_one_has_too(
    other: str | None, tmp_path: Path
) -> None:
    """What two have saved is nobody's own; what only the closed one had goes first."""
    older, both, own, new, last = (entry(n, n + 1) for n in (1, 3, 5, 7, 9))
    size = opened(tmp_path / "elsewhere").save(replace(own, session="a"), state(own))
    store = opened(tmp_path, max_bytes=3 * size + 100)
    for each, session in ((older, None), (both, "a"), (both, other), (own, "a")):
        store.save(replace(each, session=session), state(each))
    assert store.close_session("a")
    store.save(new, state(new))
    assert [store.has(each.key) for each in (older, both, own)] == [True, True, False]
    store.save(last, state(last))
    assert [store.has(each.key) for each in (older, both, new)] == [False, True, True]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_closed_chat_stays_closed(is_used: bool, tmp_path: Path) -> None:
    """After a restart, too, its file is nobody's and the first to go, unless it was used again."""
    clock = Ticks()
    older, own, new = (entry(n, n + 1) for n in (1, 3, 5))
    store = opened(tmp_path, clock=clock)
    for each, session in ((older, None), (own, "a")):
        store.save(replace(each, session=session), state(each))
    assert store.close_session("a")
    if is_used:
        store.load(own.key)
    store.note_closed()
    store = opened(tmp_path, max_bytes=store.stats().bytes + 100, clock=clock)
    assert store.close_session("a") is is_used
    store = opened(tmp_path, max_bytes=store.stats().bytes + 100, clock=clock)
    store.save(new, state(new))
    assert [store.has(each.key) for each in (older, own)] == [not is_used, is_used]


def test_what_was_crowded_out_may_come_back_once_something_was_dropped(tmp_path: Path) -> None:
    """There is room again, and nobody is told any more that there is none."""
    first, second = entry(1, 2), entry(3, 4)
    size = opened(tmp_path / "elsewhere").save(first, state(first))
    store = opened(tmp_path, max_bytes=size + 100)
    store.save(first, state(first))
    store.save(second, state(second))
    assert store.crowded_out(first.ids, first.namespace) == "made_way"
    store.drop(second.key)
    assert store.crowded_out(first.ids, first.namespace) is None


def test_a_parent_stays_while_its_children_live(tmp_path: Path) -> None:
    """Eviction takes a chain from its end, however old its start is."""
    clock = Ticks()
    store = opened(tmp_path, clock=clock)
    ids = tuple(range(1, 13))
    total = 0
    for first, last in ((0, 4), (4, 8), (8, 12)):
        part = entry(*ids[:last])
        total += store.save(part, state(part, first))
    other = entry(50, 51, 52, 53)
    total += store.save(other, state(other))
    store = opened(tmp_path, max_bytes=total, clock=clock)
    newest = entry(60, 61)
    store.save(newest, state(newest))
    store.check_integrity()
    assert [store.has(entry(*ids[:n]).key) for n in (4, 8, 12)] == [True, True, False]
    assert store.load(entry(*ids[:8]).key).state == state(entry(*ids[:8]))


def test_a_dropped_parent_stays_unseen_until_its_children_go(tmp_path: Path) -> None:
    """What others continue cannot be found any more, and leaves with the last of them."""
    store = opened(tmp_path)
    parent, child = entry(1, 2), entry(1, 2, 3, 4)
    store.save(parent, state(parent))
    store.save(child, state(child, 2))
    store.drop(parent.key)
    store.check_integrity()
    assert store.load(child.key).state == state(child)
    assert store.stats().entries == 1
    assert store.save(parent, state(parent)) == 0
    assert store.stats().entries == 2
    store.drop(parent.key)
    store.drop(child.key)
    store.check_integrity()
    assert not entry_files(tmp_path)
    assert store.stats().bytes == 0


def test_a_smaller_cap_holds_from_the_start(tmp_path: Path) -> None:
    """Opening with a cap removes the oldest, of whatever namespace."""
    store = opened(tmp_path)
    made = [entry(n, n + 1, namespace=f"model {n % 4}") for n in range(0, 20, 2)]
    (size, *_) = [store.save(each, state(each)) for each in made]
    store = opened(tmp_path, max_bytes=3 * size)
    assert [store.has(each.key) for each in made] == [False] * 7 + [True] * 3
    assert folder_bytes(tmp_path) == 3 * size


def test_a_state_larger_than_the_cap_costs_nothing(tmp_path: Path) -> None:
    """It is refused before anything is given up or written for it."""
    small = entry(1, 2)
    store = opened(tmp_path, max_bytes=2000)
    written = store.save(small, state(small))
    large = entry(*range(500))
    with pytest.raises(TooLarge):
        store.save(large, state(large))
    assert store.has(small.key)
    assert store.stats().bytes_written == written
    assert faults(store) == {"too_large": 1}


@pytest.mark.parametrize(("missing", "fault"), [(-200, Unfit), (1000, TooLarge)])
def test_a_delta_that_cannot_fit_beside_its_parent_costs_nothing(
    missing: int, fault: type[SpillFault], tmp_path: Path
) -> None:
    """What it continues must stay, and all the rest would not be room enough.

    Where the whole state would fit, that is what had better be brought.
    """
    clock = Ticks()
    ids = tuple(range(1, 200))
    parent, other, child = entry(*ids[:20]), entry(500, 501), entry(*ids)
    store = opened(tmp_path, clock=clock)
    held = store.save(parent, state(parent)) + store.save(other, state(other))
    size = opened(tmp_path / "elsewhere").save(child, state(child))
    store = opened(tmp_path, max_bytes=size - missing, clock=clock)
    with pytest.raises(fault):
        store.save(child, state(child, 20))
    store.check_integrity()
    assert [store.has(each.key) for each in (parent, other)] == [True, True]
    assert store.stats().bytes == held


def test_clearing_removes_all_of_ours_and_nothing_else(tmp_path: Path) -> None:
    """Other files in the folder are not our business."""
    foreign = tmp_path / "model.safetensors"
    foreign.write_bytes(b"theirs")
    store = opened(tmp_path)
    for ids in ((1, 2), (3, 4)):
        store.save(entry(*ids), state(entry(*ids)))
    entry_files(tmp_path)[0].write_bytes(b"")
    store.clear()
    assert [path.name for path in tmp_path.iterdir()] == [foreign.name]
    assert store.stats().entries == store.stats().bytes == 0
    with pytest.raises(Absent):
        store.load(entry(1, 2).key)


def test_a_store_that_was_not_opened_misses(tmp_path: Path) -> None:
    """Making a store touches no disk."""
    folder = tmp_path / "none"
    store = SpillStore(folder)
    assert store.lookup((1, 2), NAMESPACE) is None
    with pytest.raises(SpillFault):
        store.load(key_of(NAMESPACE, (1,)))
    assert not folder.exists()


def test_what_shares_most_is_told_apart_by_setup_and_adapters(tmp_path: Path) -> None:
    """An adapter that nobody has mounted any more is still one; after a restart, too."""
    ids = tuple(range(1, 21))
    store = opened(tmp_path)
    for namespace, length in (("m", 4), ("m\na", 6), ("m\na\nb", 8), ("n", 10), ("n\na", 9)):
        made = entry(*ids[:length], 99, namespace=namespace)
        store.save(made, state(made))
    for each in (store, opened(tmp_path)):
        near = each.nearest(ids, "m\nb")
        assert near == (None, Near(8, 9), Near(10, 11))
        assert each.nearest(ids, "m") == (Near(4, 5), Near(8, 9), Near(10, 11))
        assert each.nearest(ids, "n\nb") == (None, Near(10, 11), Near(8, 9))
        assert [each.count(namespace) for namespace in ("m", "m\nz", "n", "o")] == [3, 3, 2, 0]
        each.check_integrity()


def test_files_that_do_not_say_their_setup_are_known_where_they_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without adapters from the start, the others with the first one that says it."""
    ids = tuple(range(1, 21))
    store = opened(tmp_path)
    header = SpillStore._header

    def silent(self: SpillStore, made: SpillEntry, whole: HostState) -> Header:
        return replace(header(self, made, whole), setup="")

    with monkeypatch.context() as patch:
        patch.setattr(SpillStore, "_header", silent)
        for namespace, length in (("m", 4), ("m\na", 6), ("n", 8)):
            made = entry(*ids[:length], 99, namespace=namespace)
            store.save(made, state(made))
    for each in (store, opened(tmp_path)):
        assert [each.count(namespace) for namespace in ("m", "m\na", "n")] == [1, 1, 1]
        assert each.nearest(ids, "m\nb").adapters == Near(4, 5)
    store.save(made := entry(7, 8, 9, namespace="m\na"), state(made))
    for each in (store, opened(tmp_path)):
        assert [each.count(namespace) for namespace in ("m", "m\na", "n")] == [3, 3, 1]
        assert each.nearest(ids, "m\nb").adapters == Near(6, 7)
