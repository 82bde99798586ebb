"""All that can go wrong in a spill folder is a counted miss: no other error, no wrong state."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from spill_rig import (
    NAMESPACE,
    Broken,
    Fast,
    FullDisk,
    Ticks,
    entry,
    entry_files,
    faults,
    folder_bytes,
    opened,
    state,
)

from mlx_troupe.runtime.spill import faults as kinds
from mlx_troupe.runtime.spill.files import Files
from mlx_troupe.runtime.spill.state import HostState
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

PARENT = entry(1, 2)
CHILD = entry(1, 2, 3)
OTHER = entry(7, 8, 9)


def fill(folder: Path) -> None:
    """A whole state, a delta behind it, and another whole state."""
    store = opened(folder)
    store.save(PARENT, state(PARENT, recurrent=True))
    store.save(CHILD, state(CHILD, 2, recurrent=True))
    store.save(OTHER, state(OTHER, recurrent=True))


def try_load(store: SpillStore, made: SpillEntry) -> HostState | None:
    """What a restore comes to: the state or a miss."""
    hit = store.lookup((*made.ids, 0), made.namespace)
    if hit is None or hit.key != made.key:
        return None
    try:
        return store.load(hit.key).state
    except kinds.SpillFault:
        return None


def check_nothing_is_wrong(store: SpillStore) -> list[bool]:
    """Each of the three states is right or a miss; returns which are there."""
    there = []
    for made in (PARENT, CHILD, OTHER):
        found = try_load(store, made)
        assert found is None or found == state(made, recurrent=True)
        there.append(found is not None)
        store.check_integrity()
    return there


def file_of(folder: Path, made: SpillEntry) -> Path:
    """The file of an entry."""
    return folder / f"{made.key}.safetensors"


def test_a_changed_byte_anywhere_is_a_miss(tmp_path: Path) -> None:
    """Length, header, padding, tensors: whichever byte differs, before or after the start."""
    fill(tmp_path / "good")
    good = file_of(tmp_path / "good", PARENT).read_bytes()
    folder = tmp_path / "bad"
    for at in range(0, len(good), 7):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        damaged = bytearray(good)
        damaged[at] ^= 1 << (at // 7) % 8
        running = opened(folder) if at % 2 else None
        file_of(folder, PARENT).write_bytes(damaged)
        store = running or opened(folder)
        assert check_nothing_is_wrong(store) == [False, False, True], f"byte {at}"
        assert set(faults(store)) <= {"corrupt", "foreign_version"}
        assert faults(store)
        assert store.save(PARENT, state(PARENT)) > 0
        assert try_load(store, PARENT) == state(PARENT)


def test_without_verification_the_header_is_checked_all_the_same(tmp_path: Path) -> None:
    """Only the bytes of tensors go unhashed."""
    fill(tmp_path)
    path = file_of(tmp_path, OTHER)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    for at in range(0, header, 7):
        damaged = bytearray(good)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        store = opened(tmp_path, verify=False)
        assert try_load(store, OTHER) is None, f"byte {at}"
    path.write_bytes(good)
    assert try_load(opened(tmp_path, verify=False), OTHER) == state(OTHER, recurrent=True)


@pytest.mark.parametrize("end", [b"", b"\0"], ids=["truncated", "zeroed"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_cut_at_any_length_is_a_miss(tmp_path: Path, verify: bool, end: bytes) -> None:
    """Half-written under its own name, or with zeros where the rest should be."""
    fill(tmp_path / "good")
    good = file_of(tmp_path / "good", CHILD).read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    folder = tmp_path / "bad"
    for length in sorted({*range(0, len(good), 19), header - 1, header, header + 1, len(good) - 1}):
        if end and not verify and length >= header:
            continue  # a disk that loses what it said was durable: only hashing tells
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        running = opened(folder, verify=verify) if length % 2 else None
        file_of(folder, CHILD).write_bytes(good[:length] + end * (len(good) - length))
        store = running or opened(folder, verify=verify)
        assert check_nothing_is_wrong(store) == [True, False, True], f"{length} bytes"
        assert store.save(CHILD, state(CHILD, 2, recurrent=True)) > 0
        assert check_nothing_is_wrong(store) == [True, True, True]


def test_a_file_that_grew_is_a_miss(tmp_path: Path) -> None:
    """More bytes than the header accounts for are not what was written."""
    fill(tmp_path)
    with file_of(tmp_path, OTHER).open("ab") as file:
        file.write(b"\0")
    store = opened(tmp_path, verify=False)
    assert check_nothing_is_wrong(store) == [True, True, False]
    assert store.stats().quarantined == 1


def test_a_damaged_file_is_set_aside_once_and_goes_first(tmp_path: Path) -> None:
    """It is met with once; it weighs under the cap until room is needed or the next start."""
    fill(tmp_path)
    file_of(tmp_path, OTHER).write_bytes(b"not a state at all")
    store = opened(tmp_path)
    for _ in range(3):
        assert try_load(store, OTHER) is None
    assert faults(store) == {"corrupt": 1}
    assert (store.stats().quarantined, store.stats().dead_files) == (1, 1)
    assert store.stats().bytes == folder_bytes(tmp_path)
    assert [p.name for p in tmp_path.glob("*.bad")] == [f"{OTHER.key}.bad"]
    opened(tmp_path)
    assert not list(tmp_path.glob("*.bad"))


def test_another_version_is_left_alone_until_room_is_needed(tmp_path: Path) -> None:
    """A file of a version that we do not know is a miss; it is the first to be evicted."""
    fill(tmp_path)
    path = file_of(tmp_path, OTHER)
    path.write_bytes(path.read_bytes().replace(b'"version":"1"', b'"version":"9"'))
    store = opened(tmp_path)
    assert check_nothing_is_wrong(store) == [True, True, False]
    assert faults(store) == {"foreign_version": 1}
    assert path.exists()
    cap = folder_bytes(tmp_path)
    store = opened(tmp_path, max_bytes=cap)
    made = entry(40, 41)
    store.save(made, state(made))
    assert not path.exists()
    assert check_nothing_is_wrong(store) == [True, True, False]


def test_a_foreign_file_under_a_name_of_ours_serves_nobody(tmp_path: Path) -> None:
    """A state of other ids, or of another model, does not become ours by its file's name."""
    fill(tmp_path)
    foreign = entry(7, 8, 9, namespace="another model")
    opened(tmp_path).save(foreign, state(foreign))
    shutil.copy(file_of(tmp_path, foreign), file_of(tmp_path, OTHER))
    running = opened(tmp_path)
    assert check_nothing_is_wrong(running) == [True, True, False]
    assert try_load(running, foreign) == state(foreign)
    assert faults(running) == {"corrupt": 1}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_unreadable_file_is_a_miss(tmp_path: Path, number: int) -> None:
    """Before the start and after it; the file is not touched."""
    fill(tmp_path)
    store = opened(tmp_path)
    store._folder._files = Broken(number, "open")  # type: ignore[attr-defined]
    assert check_nothing_is_wrong(store) == [False, False, False]
    assert set(faults(store)) == {"unreadable"}
    store = opened(tmp_path, files=Broken(number, "open"))
    assert check_nothing_is_wrong(store) == [False, False, False]
    assert faults(store) == {"unreadable": 3}
    assert len(entry_files(tmp_path)) == 3
    assert check_nothing_is_wrong(opened(tmp_path)) == [True, True, True]


def test_a_read_only_folder_still_serves(tmp_path: Path) -> None:
    """Loads go on; every save is a fault that leaves nothing behind."""
    fill(tmp_path)
    broken = Broken(errno.EROFS, "create", "rename", "remove", "touch")
    store = opened(tmp_path, files=broken)
    for _ in range(3):
        with pytest.raises(kinds.Unwritable):
            store.save(entry(50, 51), state(entry(50, 51)))
    assert check_nothing_is_wrong(store) == [True, True, True]
    assert faults(store) == {"unwritable": 3}
    with pytest.raises(kinds.Unwritable):
        store.drop(OTHER.key)
    file_of(tmp_path, CHILD).write_bytes(b"damaged")
    assert check_nothing_is_wrong(store)[:2] == [True, False]


@pytest.mark.parametrize("step", ["create", "write", "sync", "rename", "sync_folder"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_write_that_fails_at_any_step_leaves_no_file(
    tmp_path: Path, step: str, number: int
) -> None:
    """No temporary file, no entry; what was there stays readable."""
    fill(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    store = opened(tmp_path, files=Broken(number, step))
    full = number in (errno.ENOSPC, errno.EDQUOT)
    with pytest.raises(kinds.DiskFull if full else kinds.Unwritable):
        store.save(entry(50, 51), state(entry(50, 51)))
    after = sorted(path.name for path in tmp_path.iterdir())
    if full:  # the oldest made room, for nothing
        assert set(after) < set(before)
        with pytest.raises(kinds.DiskFull):
            store.save(entry(50, 51), state(entry(50, 51)))
        assert sorted(path.name for path in tmp_path.iterdir()) == after
    else:
        assert after == before
    assert check_nothing_is_wrong(store)[2]
    assert not store.has(entry(50, 51).key)


def test_on_a_full_disk_the_oldest_make_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as are needed, and no more: recent states are still there. It is told once."""
    made = [entry(n, n + 1) for n in range(0, 40, 2)]
    size = opened(tmp_path / "one").save(made[0], state(made[0]))
    disk = FullDisk(room=4 * size + 10)
    store = opened(tmp_path / "two", files=disk)
    for each in made:
        store.save(each, state(each))
        store.check_integrity()
    assert [each for each in made if store.has(each.key)] == made[-4:]
    for each in made[-4:]:
        assert store.load(each.key).state == state(each)
    assert store.stats().bytes == folder_bytes(tmp_path / "two") == 4 * size
    assert faults(store) == {"disk_full": 16}
    assert store.stats().unheard == 16
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [r.getMessage() for r in caplog.records] == [f"SSD cache: {no_space}"]
    assert not list((tmp_path / "two").glob(".*"))


def test_a_vanished_folder_is_a_miss_and_is_not_made_again(tmp_path: Path) -> None:
    """An unplugged disk must not be written to where it was mounted; it may come back."""
    folder = tmp_path / "disk"
    fill(folder)
    store = opened(folder)
    folder.rename(tmp_path / "unplugged")
    with pytest.raises(kinds.FolderGone):
        store.load(OTHER.key)
    assert store.lookup((*OTHER.ids, 0), NAMESPACE) is None
    with pytest.raises(kinds.FolderGone):
        store.save(OTHER, state(OTHER))
    assert not folder.exists()
    assert store.stats().bytes == 0
    (tmp_path / "unplugged").rename(folder)
    assert store.save(entry(50, 51), state(entry(50, 51))) > 0
    assert check_nothing_is_wrong(store) == [True, True, True]


def test_a_folder_that_vanishes_while_it_is_written_to_is_a_fault(tmp_path: Path) -> None:
    """Between any two steps of a write."""
    folder = tmp_path / "disk"

    class Unplugged(Fast):
        def __init__(self, step: str) -> None:
            self.step = step

        def create(self, path: Path) -> int:
            return self._before("create", lambda: super(Unplugged, self).create(path))

        def sync(self, fd: int) -> None:
            self._before("sync", lambda: super(Unplugged, self).sync(fd))

        def rename(self, old: Path, new: Path) -> None:
            self._before("rename", lambda: super(Unplugged, self).rename(old, new))

        def sync_folder(self, folder: Path) -> None:
            self._before("sync_folder", lambda: Files.sync_folder(self, folder))

        def _before(self, step: str, act: Callable[[], object]):
            if self.step == step:
                shutil.rmtree(folder)
            return act()

    for step in ("create", "sync", "rename", "sync_folder"):
        fill(folder)
        store = opened(folder, files=Unplugged(step))
        with pytest.raises(kinds.FolderGone):
            store.save(entry(50, 51), state(entry(50, 51)))
        assert check_nothing_is_wrong(store) == [False, False, False]


def test_what_was_planted_is_skipped_and_leftovers_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty, half and random files, folders, links: none is an entry, none stops the start.

    They are counted, and the first is told of.
    """
    fill(tmp_path)
    half = file_of(tmp_path, OTHER).read_bytes()[:700]
    names = [f"{n:040x}.safetensors" for n in range(5)]
    (tmp_path / names[0]).write_bytes(b"")
    (tmp_path / names[1]).write_bytes(half)
    (tmp_path / names[2]).write_bytes(os.urandom(5000))
    (tmp_path / names[3]).mkdir()
    (tmp_path / names[4]).symlink_to(file_of(tmp_path, OTHER))
    (tmp_path / f".{OTHER.key}.0123456789abcdef.tmp").write_bytes(half)
    (tmp_path / f".{OTHER.key}.1123456789abcdef.tmp").write_bytes(b"")
    (tmp_path / "notes.tmp").write_bytes(b"theirs")
    store = opened(tmp_path)
    assert check_nothing_is_wrong(store) == [True, True, True]
    assert store.stats().leftovers == 2
    assert faults(store) == {"corrupt": 3}
    assert store.stats().unheard == 3
    (told,) = [record.getMessage() for record in caplog.records]
    assert any(name in told for name in names)
    assert sorted(path.name for path in tmp_path.glob("*tmp")) == ["notes.tmp"]
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_another_store_is_writing_is_no_leftover(tmp_path: Path) -> None:
    """A store that starts meanwhile neither removes nor reads it."""

    class Opening(Fast):
        def rename(self, old: Path, new: Path) -> None:
            assert opened(tmp_path).stats().leftovers == 0
            super().rename(old, new)

    store = opened(tmp_path, files=Opening())
    store.save(OTHER, state(OTHER))
    assert store.load(OTHER.key).state == state(OTHER)


def test_two_stores_on_one_folder_share_and_do_no_harm(tmp_path: Path) -> None:
    """What one writes the other finds with its next save; what one removes the other misses."""
    one, two = opened(tmp_path), opened(tmp_path)
    one.save(PARENT, state(PARENT))
    one.save(CHILD, state(CHILD, 2))
    assert try_load(two, CHILD) is None
    two.save(OTHER, state(OTHER))
    assert try_load(two, CHILD) == state(CHILD)
    one.drop(CHILD.key)
    assert try_load(two, CHILD) is None
    assert faults(two) == {"absent": 1}
    assert try_load(two, PARENT) == state(PARENT)
    one.drop(PARENT.key)
    with pytest.raises(kinds.Unfit):
        two.save(CHILD, state(CHILD, 2))
    assert two.save(CHILD, state(CHILD)) > 0
    for store in (one, two):
        store.check_integrity()


def test_a_delta_behind_a_parent_that_was_replaced_is_a_miss(tmp_path: Path) -> None:
    """Its parent is the very file it was written for, not any of the same tokens."""
    one, two = opened(tmp_path), opened(tmp_path)
    one.save(PARENT, state(PARENT))
    one.save(CHILD, state(CHILD, 2))
    file_of(tmp_path, PARENT).unlink()
    clock = Ticks()
    clock.now += 5
    opened(tmp_path / "else", clock=clock).save(PARENT, state(PARENT))
    shutil.copy(file_of(tmp_path / "else", PARENT), file_of(tmp_path, PARENT))
    assert try_load(one, CHILD) is None
    assert faults(one) == {"unfit": 1}
    assert not file_of(tmp_path, CHILD).exists()
    assert try_load(one, PARENT) == state(PARENT)
    with pytest.raises(kinds.Unfit):
        one.save(CHILD, state(CHILD, 2))
    assert one.save(CHILD, state(CHILD, 2)) > 0
    assert try_load(one, CHILD) == state(CHILD)
    two.check_integrity()


def test_two_stores_hold_the_cap_together(tmp_path: Path) -> None:
    """Each counts what the other wrote before it writes."""
    made = [entry(n, n + 1) for n in range(0, 40, 2)]
    size = opened(tmp_path / "one").save(made[0], state(made[0]))
    folder = tmp_path / "two"
    stores = [opened(folder, max_bytes=4 * size) for _ in range(2)]
    for index, each in enumerate(made):
        stores[index % 2].save(each, state(each))
        assert folder_bytes(folder) <= 4 * size


def test_many_threads_on_two_stores_never_see_a_wrong_state(tmp_path: Path) -> None:
    """Saves, loads, drops and evictions at once: right states or faults, and the cap at the end."""
    made = [entry(n, n + 1, n + 2) for n in range(8)]
    size = opened(tmp_path / "one").save(made[0], state(made[0]))
    folder = tmp_path / "two"
    stores = [opened(folder, max_bytes=5 * size) for _ in range(2)]
    wrong: list[object] = []

    def work(seed: int) -> None:
        store = stores[seed % 2]
        for turn in range(40):
            each = made[(turn * 5 + seed * 3) % len(made)]
            try:
                if (turn + seed) % 3 == 0:
                    store.save(each, state(each))
                elif (turn + seed) % 11 == 0:
                    store.drop(each.key)
                elif store.load(each.key).state != state(each):
                    wrong.append(each)
            except kinds.SpillFault:
                continue
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for store in stores:
        store.check_integrity()
    stores[0].save(entry(90, 91, 92), state(entry(90, 91, 92)))
    assert folder_bytes(folder) <= 5 * size


def test_no_memory_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state too large to be read into memory stays where it is."""
    fill(tmp_path)
    store = opened(tmp_path)

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("mlx_troupe.runtime.spill.format.own_pages", refuse)
    with pytest.raises(kinds.NoMemory):
        store.load(OTHER.key)
    monkeypatch.undo()
    assert check_nothing_is_wrong(store) == [True, True, True]
