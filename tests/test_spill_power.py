"""Power cuts: after any byte and between any two steps nothing wrong can be restored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from spill_rig import Fast, Mortal, PowerCut, Ticks, entry, folder_bytes, opened, state

from mlx_troupe.runtime.spill.faults import Absent
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

OLD = entry(1, 2)
DELTA = entry(1, 2, 3)
OTHER = entry(7, 8)
EVERY = (OLD, DELTA, OTHER)


def run(folder: Path, files: Fast | Mortal, cap: int | None) -> None:
    """One save of a delta and one of a whole state, for which something old may have to go."""
    store = SpillStore(folder, max_bytes=cap, clock=Ticks(), files=files)
    store.open()
    store.save(DELTA, state(DELTA, 2))
    store.save(OTHER, state(OTHER))


def there(store: SpillStore, made: SpillEntry) -> bool:
    """Whether a state can be had; it must then be the right one."""
    try:
        found = store.load(made.key).state
    except Absent:
        return False
    assert found == state(made)
    return True


@pytest.mark.parametrize("capped", [False, True])
def test_a_cut_between_any_two_steps_restores_nothing_wrong(tmp_path: Path, capped: bool) -> None:
    """Each state is whole or a miss, the folder is clean, and the next save works."""
    base = tmp_path / "base"
    opened(base).save(OLD, state(OLD))
    sizes = [path.stat().st_size for path in base.iterdir()]
    whole = tmp_path / "whole"
    shutil.copytree(base, whole)
    steps = Mortal(1 << 30, chunk=1)
    run(whole, steps, None)
    cap = folder_bytes(whole) - 1 if capped else None
    cuts = sorted({*range(0, len(steps.done), 23), *_edges(steps.done)})
    folder = tmp_path / "cut"
    for cut in cuts:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        try:
            run(folder, Mortal(cut, chunk=1), cap)
        except PowerCut:
            pass
        else:
            assert capped, "there was no cut"
        store = opened(folder, max_bytes=cap)
        found = [there(store, made) for made in EVERY]
        assert found[0] or capped
        assert not list(folder.glob(".*")), "a leftover stayed"
        assert store.stats().bytes == folder_bytes(folder)
        assert store.stats().faults == ((("absent", found.count(False)),) if False in found else ())
        assert store.save(OTHER, state(OTHER)) == (0 if found[2] else sizes[0])
        assert there(store, OTHER)


def _edges(done: list[str]) -> set[int]:
    """Cuts right before and after everything that is not one of many bytes."""
    steps = [at for at, name in enumerate(done) if name != "write"]
    return {cut for at in steps for cut in (at - 1, at, at + 1) if 0 <= cut < len(done)}


def test_a_write_that_stopped_after_any_byte_is_no_entry(tmp_path: Path) -> None:
    """Every prefix of a file, under the name that it has until it is whole."""
    opened(tmp_path / "else").save(OTHER, state(OTHER))
    (path,) = (tmp_path / "else").iterdir()
    whole = path.read_bytes()
    folder = tmp_path / "cut"
    opened(folder).save(OLD, state(OLD))
    temporary = folder / f".{OTHER.key}.0123456789abcdef.tmp"
    for length in range(len(whole) + 1):
        temporary.write_bytes(whole[:length])
        store = opened(folder)
        assert [there(store, made) for made in (OLD, OTHER)] == [True, False]
        assert not temporary.exists()
        assert store.stats().leftovers == 1


def test_a_file_is_durable_before_it_gets_its_name(tmp_path: Path) -> None:
    """Create, write, make durable, rename, make the name durable; only then is it saved."""
    files = Mortal(1 << 30)
    store = SpillStore(tmp_path, files=files)
    store.open()
    store.save(OLD, state(OLD))
    steps = [name for at, name in enumerate(files.done) if name != files.done[at - 1]]
    assert steps == ["create", "write", "sync", "rename", "sync_folder"]


def test_eviction_removes_children_before_what_they_continue(tmp_path: Path) -> None:
    """A cut between two removals leaves a chain that still has its start."""
    clock = Ticks()
    store = opened(tmp_path, clock=clock)
    ids = tuple(range(1, 9))
    for first, last in ((0, 2), (2, 4), (4, 6), (6, 8)):
        made = entry(*ids[:last])
        store.save(made, state(made, first))
    kept = [path.name for path in tmp_path.iterdir()]

    class Counting(Fast):
        removed: list[str]

        def remove(self, path: Path) -> None:
            self.removed.append(path.stem)
            super().remove(path)

    files = Counting()
    files.removed = []
    opened(tmp_path, max_bytes=1, files=files, clock=clock)
    assert files.removed == [entry(*ids[:n]).key for n in (8, 6, 4, 2)]
    assert len(kept) == 4
