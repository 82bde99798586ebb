"""Of a state that begins with one on disk only the rest is written, and only if it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from spill_rig import NAMESPACE, ODD, Ticks, entry, entry_files, faults, opened, state

from mlx_troupe.runtime.plans import RowId
from mlx_troupe.runtime.prefix.entries import Origin
from mlx_troupe.runtime.spill import parents
from mlx_troupe.runtime.spill.faults import TooLarge, Unfit
from mlx_troupe.runtime.spill.state import HostArray, HostLayer, HostState, nbytes
from mlx_troupe.runtime.spill.store import SpillEntry, SpillStore

IDS = tuple(range(1000, 1400))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_chat_that_grows_is_written_once(tmp_path: Path, recurrent: bool) -> None:
    """Each turn costs its own tokens, and every turn can be had after a restart."""
    store = opened(tmp_path)
    turns = [entry(*IDS[:length]) for length in (100, 150, 260, 400)]
    sizes = [store.save(turn, state(turn, recurrent=recurrent)) for turn in turns]
    store.check_integrity()
    store = opened(tmp_path)
    for turn in turns:
        assert store.load(turn.key).state == state(turn, recurrent=recurrent)
    alone = opened(tmp_path / "else").save(turns[-1], state(turns[-1], recurrent=recurrent))
    assert sum(sizes) < 1.4 * alone
    assert sizes[1] < sizes[0] < sizes[2] + sizes[3]


def test_chats_share_their_system_prompt(tmp_path: Path) -> None:
    """Branches lie behind one file; it stays until the last of them goes."""
    store = opened(tmp_path)
    system = entry(*IDS[:200])
    size = store.save(system, state(system))
    chats = [entry(*IDS[:200], *range(n, n + 30)) for n in (1, 50, 99)]
    for chat in chats:
        assert store.save(chat, state(chat)) < size / 2
    store.drop(system.key)
    for chat in chats:
        assert store.load(chat.key).state == state(chat)
        store.drop(chat.key)
    assert not entry_files(tmp_path)


def test_a_state_with_other_bits_is_written_whole(tmp_path: Path) -> None:
    """The same tokens computed in another way are not mixed with what was kept."""
    store = opened(tmp_path)
    short, long = (entry(*IDS[:n], namespace=ODD) for n in (100, 120))
    store.save(short, state(short))
    assert store.save(long, state(long)) > len(IDS[:120]) * 48
    for made in (short, long):
        found = store.load(made.key)
        assert found.state == state(made)
    assert found.read_bytes == entry_files(tmp_path)[-1].stat().st_size


def test_one_bit_in_one_head_is_enough(tmp_path: Path) -> None:
    """The comparison sees every byte of the shared tokens."""
    made, longer = entry(*IDS[:8]), entry(*IDS[:12])
    right = state(longer)
    layer = right.layers[0]
    size = len(layer.arrays[0].data)
    for at in (0, size // 2 - 1, size // 2 - 64, size // 2, size - 65):
        keys = bytearray(layer.arrays[0].data)
        keys[at] ^= 1
        bent = HostArray("float32", layer.arrays[0].shape, bytes(keys))
        odd = HostLayer(layer.kind, layer.meta, (bent, layer.arrays[1]), layer.token_axis)
        store = opened(tmp_path / str(at))
        store.save(made, state(made))
        other = HostState(right.length, (odd,))
        store.save(longer, other)
        assert store.load(longer.key).state == other
        shared = at in (size // 2 - 1, size // 2 - 64)  # tokens behind the earlier state
        assert (store.load(longer.key, upto=1).ids == made.ids) == shared


def test_a_state_without_tokens_to_share_stands_alone(tmp_path: Path) -> None:
    """Recurrent states and rings would only depend on a file that spares them nothing."""
    store = opened(tmp_path)
    layer = HostLayer("arrays", (), (HostArray("uint8", (900,), bytes(900)),), (None,))
    for length in (2, 4):
        store.save(entry(*IDS[:length]), HostState(length, (layer,)))
    assert store.load(entry(*IDS[:4]).key, upto=1).ids == IDS[:4]


def test_behind_a_damaged_file_a_state_is_written_whole(tmp_path: Path) -> None:
    """The save goes through; the damage is counted and set aside."""
    store = opened(tmp_path)
    short, long = entry(*IDS[:100]), entry(*IDS[:120])
    store.save(short, state(short))
    path = entry_files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert store.save(long, state(long)) > 0
    assert faults(store) == {"corrupt": 1}
    assert store.load(long.key).state == state(long)
    assert not store.has(short.key)


def test_a_chain_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many files a state is written whole, and its chain starts anew."""
    monkeypatch.setattr(parents, "LONGEST_CHAIN", 8)
    store = opened(tmp_path)
    made: SpillEntry | None = None
    for length in range(1, 13):
        made = entry(*IDS[:length])
        store.save(made, state(made))
    assert made is not None
    found = store.load(made.key)
    assert found.state == state(made)
    files = {path.stat().st_size for path in entry_files(tmp_path)[-4:]}
    assert found.read_bytes <= 4 * max(files)
    assert store.lookup((*IDS[:10], 0), NAMESPACE).length == 10


def test_checkpoints_of_a_long_answer_cost_little_more_than_its_state(tmp_path: Path) -> None:
    """8,192 tokens, saved every 64: at most 1.2 times the bytes that the answer made."""
    store = opened(tmp_path)
    ids = tuple(range(8192))
    width = 2048
    keys = b"".join(n.to_bytes(4, "little") * (width // 4) for n in ids)
    for length in range(64, 8193, 64):
        held = HostArray("uint8", (length, width), keys[: length * width])
        layer = HostLayer("plain", (), (held,), (0,))
        whole = HostState(length, (layer,))
        made = SpillEntry("model", ids[:length], "partial", True)
        store.save(made, whole, Origin(RowId(1), length < 8192))
    assert store.load(SpillEntry("model", ids, "partial", True).key).state == whole
    assert store.stats().bytes_written <= 1.2 * nbytes(whole)


def test_a_shared_state_was_used_when_a_chat_behind_it_was(tmp_path: Path) -> None:
    """A system prompt whose last chat went outlives what was used before that chat."""
    clock = Ticks()
    store = opened(tmp_path, clock=clock)
    system, chat, other = entry(*IDS[:20]), entry(*IDS[:24]), entry(*IDS[100:120])
    for made in (system, chat, other):
        store.save(made, state(made))
    store.load(chat.key)
    store.drop(chat.key)
    store._shelf.max_bytes = store.stats().bytes
    newest = entry(*IDS[200:210])
    store.save(newest, state(newest))
    assert [store.has(made.key) for made in (system, other, newest)] == [True, False, True]


def test_a_state_of_another_form_is_written_whole(tmp_path: Path) -> None:
    """A row whose keys were encoded meanwhile no longer begins with what was kept plain."""
    store = opened(tmp_path)
    short, long = entry(*IDS[:20]), entry(*IDS[:24])
    store.save(short, state(short))
    keys = HostArray("uint8", (24, 40), bytes(960))
    encoded = HostState(24, (HostLayer("affine", (("bits", 8),), (keys,), (0,)),))
    store.save(long, encoded)
    assert store.load(long.key).state == encoded
    assert not faults(store)


def grown(length: int, fixed: int, first: int = 0) -> tuple[SpillEntry, HostState]:
    """A state of which ``fixed`` bytes are the same size at any length."""
    made = entry(*IDS[:length], cuttable=False)
    layer = HostLayer("arrays", (), (HostArray("uint8", (fixed,), bytes(fixed)),), (None,))
    tokens = state(made, first)
    return made, HostState(length, (*tokens.layers, layer), first)


def test_a_chain_over_the_cap_is_written_as_one_file(tmp_path: Path) -> None:
    """Where the files of all its turns have no room together, but the state has."""
    store = opened(tmp_path, max_bytes=100_000)
    for length in (100, 150, 200):
        made, whole = grown(length, 30_000)
        written = store.save(made, whole)
        assert written > 30_000
        store.check_integrity()
    assert store.stats().evictions == 1
    assert store.load(made.key).read_bytes == written, "it continues nothing"
    assert store.load(made.key).state == whole
    assert opened(tmp_path).load(made.key).state == whole
    assert not faults(store)


def test_a_row_whose_chain_is_over_the_cap_is_asked_for_all_of_it(tmp_path: Path) -> None:
    """And a state that has no room in any form is refused at once, as too large."""
    store = opened(tmp_path, max_bytes=100_000)
    row = Origin(RowId(1), runs=True)
    for length, first in ((100, 0), (150, 100)):
        store.save(*grown(length, 30_000, first), row)
    with pytest.raises(Unfit):
        store.save(*grown(200, 30_000, 150), row)
    made, whole = grown(200, 30_000)
    store.save(made, whole, row)
    assert store.load(made.key).state == whole
    assert store.continued(row) == 200
    with pytest.raises(TooLarge):
        store.save(*grown(400, 95_000, 200), row)
    assert store.crowded_out(IDS[:400], NAMESPACE) == "too_large"


def test_a_ring_that_turned_is_written_whole_beside_shared_layers(tmp_path: Path) -> None:
    """Layers that see everything are continued, and the ring is what it is now."""
    store = opened(tmp_path)
    short, long = entry(*IDS[:200]), entry(*IDS[:210])
    straight = HostLayer("ring", (), (HostArray("uint8", (200, 8), bytes(1600)),), (0,))
    turned = HostLayer("ring", (("at", 3),), (HostArray("uint8", (64, 8), b"7" * 512),), (None,))
    size = store.save(short, HostState(200, (*state(short).layers, straight)))
    later = HostState(210, (*state(long).layers, turned))
    assert store.save(long, later) < size / 2
    assert opened(tmp_path).load(long.key).state == later


def saved_on_the_way(tmp_path: Path, lengths: tuple[int, ...], *, cuttable: bool) -> SpillStore:
    """A store with states of one row, each longer than the one before, the last one its end."""
    store = opened(tmp_path)
    for length in lengths:
        made = entry(*IDS[:length], cuttable=cuttable)
        store.save(
            made, state(made, recurrent=not cuttable), Origin(RowId(7), length < lengths[-1])
        )
    return store


def test_a_row_continues_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared, and another row's longer state of the same ids is left alone."""
    monkeypatch.setattr(parents, "starts_with", None)
    store = saved_on_the_way(tmp_path, (100, 150), cuttable=True)
    monkeypatch.undo()
    odd = entry(*IDS[:180])
    keys = HostArray("uint8", (180, 8), bytes(1440))
    store.save(
        odd, HostState(180, (HostLayer("plain", (), (keys,), (0,)),)), Origin(RowId(8), True)
    )
    long = entry(*IDS[:200])
    assert store.save(long, state(long), Origin(RowId(7), False)) < nbytes(state(long)) / 2
    assert opened(tmp_path).load(long.key).state == state(long)


def test_a_row_whose_last_file_is_gone_is_written_whole(tmp_path: Path) -> None:
    """Dropped, or damaged meanwhile: the next state does not depend on it."""
    for damage in (lambda store, key: store.drop(key), _cut_file):
        store = saved_on_the_way(tmp_path, (100, 150), cuttable=True)
        short, long = entry(*IDS[:150]), entry(*IDS[:200])
        damage(store, short.key)
        store.save(long, state(long), Origin(RowId(7), False))
        assert opened(tmp_path).load(long.key).state == state(long)
        store.clear()


def _cut_file(store: SpillStore, key: str) -> None:
    path = store.folder / f"{key}.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def test_what_a_row_kept_on_the_way_goes_with_its_next_state(tmp_path: Path) -> None:
    """Where that does not cover it; what it continues stays on disk and is not found."""
    store = saved_on_the_way(tmp_path, (100, 150, 200), cuttable=False)
    assert len(store._shelf.books) == 1
    last = entry(*IDS[:200], cuttable=False)
    assert opened(tmp_path).load(last.key).state == state(last, recurrent=True)
    assert not faults(store)


def test_a_state_on_the_way_stays_beside_one_whose_last_tokens_nobody_heard(
    tmp_path: Path,
) -> None:
    """The client's record may end before it, where only the earlier one is of use."""
    store = opened(tmp_path)
    for length, unheard in ((100, False), (150, False), (200, True)):
        made = entry(*IDS[:length], cuttable=False)
        origin = Origin(RowId(7), runs=not unheard, unheard=unheard)
        store.save(made, state(made, recurrent=True), origin)
    for length, useful in ((200, 150), (201, 200)):
        hit = store.lookup(IDS[:length], NAMESPACE)
        assert hit is not None
        assert hit.length == useful


def test_a_prompts_state_stays(tmp_path: Path) -> None:
    """Others may begin with it."""
    store = opened(tmp_path)
    for length, runs in ((100, False), (150, True), (200, True)):
        made = entry(*IDS[:length], cuttable=False)
        store.save(made, state(made, recurrent=True), Origin(RowId(7), runs))
    assert store.lookup((*IDS[:100], 0), NAMESPACE).length == 100
    assert store.lookup((*IDS[:150], 0), NAMESPACE).length == 100
    assert store.lookup((*IDS[:200], 0), NAMESPACE).length == 200


def test_a_rows_delta_is_taken_only_behind_its_own_file(tmp_path: Path) -> None:
    """Another row's state of the same ids may differ in its last bits."""
    store = saved_on_the_way(tmp_path, (100, 150), cuttable=True)
    mine, long = Origin(RowId(7), True), entry(*IDS[:200])
    assert store.continued(mine) == 150
    assert store.continued(Origin(RowId(8), True)) == store.continued(None) == 0
    with pytest.raises(Unfit):
        store.save(long, state(long, 150), Origin(RowId(8), True))
    store.save(long, state(long, 150), mine)
    assert store.continued(mine) == 200
    assert opened(tmp_path).load(long.key).state == state(long)
    store.drop(long.key)
    assert store.continued(mine) == 0


def test_a_row_that_changed_its_form_is_asked_for_all_of_it(tmp_path: Path) -> None:
    """Its delta cannot be joined; the next state is whole."""
    store = saved_on_the_way(tmp_path, (100, 150), cuttable=True)
    mine = Origin(RowId(7), True)
    keys = HostArray("uint8", (50, 40), bytes(2000))
    encoded = HostState(200, (HostLayer("affine", (("bits", 8),), (keys,), (0,)),), 150)
    with pytest.raises(Unfit):
        store.save(entry(*IDS[:200]), encoded, mine)
    assert store.continued(mine) == 0
