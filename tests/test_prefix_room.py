"""How much of the memory tier stays free, and what must leave under pressure."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.device import DeviceStats
from mlx_troupe.runtime.model_info import ModelInfo
from mlx_troupe.runtime.prefix.room import Headroom, excess


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**12)))
def test_the_headroom_stays_within_its_shares_of_the_limit(limit: int, missed: list[int]) -> None:
    """Whatever was missed, and however long nothing is."""
    room = Headroom(limit)
    for nbytes in missed:
        room.missed(nbytes)
        assert limit // 32 <= room.bytes <= limit // 2
    for _ in range(100):
        before = room.bytes
        room.kept()
        assert limit // 32 <= room.bytes <= before


def test_a_missed_state_has_room_the_next_time_and_that_is_forgotten_slowly() -> None:
    """A thousand states later more than a third of what it took is still free."""
    room = Headroom(32_000)
    room.missed(8_000)
    assert room.bytes == 9_000
    for _ in range(1000):
        room.kept()
    assert 3_000 < room.bytes < 5_000
    for _ in range(9000):
        room.kept()
    assert room.bytes < 2_000


def test_pressure_begins_at_85_percent_and_counts_no_state_that_is_leaving() -> None:
    """What was released and is not gone yet must not be released once more in others' place."""
    model = ModelInfo("m", 9, None, frozenset(), memory_bytes=1000, weights_bytes=600)
    at_rest = DeviceStats(active_bytes=850, snapshot_bytes=300)
    assert excess(at_rest, 300, model) == 0
    pressed = DeviceStats(active_bytes=900, snapshot_bytes=300)
    assert excess(pressed, 300, model) == 50
    assert excess(pressed, 280, model) == 30
    assert excess(pressed, 250, model) == 0
    assert excess(pressed, 400, model) == 50, "states that are not made yet change nothing"
    assert excess(pressed, 300, replace(model, memory_bytes=0)) == 0, "nobody knows how much"


def test_large_weights_alone_are_no_pressure() -> None:
    """Half of what they leave is there for states and rows, however little that is."""
    model = ModelInfo("m", 9, None, frozenset(), memory_bytes=1000, weights_bytes=900)
    assert excess(DeviceStats(active_bytes=950, snapshot_bytes=40), 40, model) == 0
    assert excess(DeviceStats(active_bytes=960, snapshot_bytes=40), 40, model) == 10
