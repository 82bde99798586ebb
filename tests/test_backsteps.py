"""A lone row's state one token back is, to the last bit, that of a row which never went further."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from company import WordTokenizer, ask, run
from device_rig import Driver
from tiny import make_checkpoint, prompt
from tiny_hybrids import HYBRIDS

from mlx_troupe.actors.system import open_runtime
from mlx_troupe.runtime.engine import backsteps
from mlx_troupe.runtime.kvschemes import PLAIN_KV, AffineKV, KVScheme, TurboKV
from mlx_troupe.runtime.plans import KeepRow, RowId, SnapshotId, SnapshotMade, SnapshotSkipped
from mlx_troupe.runtime.requests import Finished, FinishReason
from mlx_troupe.runtime.settings import Settings

pytestmark = pytest.mark.mlx

A, B = RowId(1), RowId(2)
BACK, NEVER = SnapshotId(1), SnapshotId(2)
WIDE = {"head_dim": 64, "sliding_window": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding": ("sliding", WIDE),
    "gemma3_text": ("gemma3_text", {}),
    "gemma4_text": ("gemma4_text", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_5": ("qwen3_5", {}),
    "falcon_h1": ("llama", {**HYBRIDS["falcon_h1"], "model_type": "falcon_h1"}),
}
FORMS: list[tuple[str, KVScheme]] = [
    *((name, PLAIN_KV) for name in MODELS),
    ("sliding", AffineKV(8)),
    ("sliding", AffineKV(4, start=30)),
    ("sliding", TurboKV()),
]
WINDOW = 16


@cache
def folder(name: str) -> Path:
    """One of ``MODELS`` as a checkpoint."""
    family, config = MODELS[name]
    return make_checkpoint(Path(tempfile.mkdtemp(prefix="back")) / "m", family, **config)


@pytest.fixture
def drive() -> Iterator[Callable[[str, KVScheme], Driver]]:
    """Opens drivers and closes their devices."""
    opened: list[Driver] = []

    def open_(name: str, kv: KVScheme = PLAIN_KV) -> Driver:
        opened.append(Driver(folder(name), kv=kv))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.device.close()


@pytest.mark.parametrize(("name", "kv"), FORMS, ids=str)
@pytest.mark.parametrize("length", [11, 17, 40])
def test_a_state_one_token_back_is_that_of_a_row_that_never_went_further(
    name: str, kv: KVScheme, length: int, drive: Callable[..., Driver]
) -> None:
    """Before a window turns, as it turns, behind a long prefill, and once around the ring."""
    driver = drive(name, kv)
    for row in (A, B):
        driver.start(row, prompt(length))
    refused: list[int] = []
    for have in range(length, length + WINDOW + 6):
        driver.decode(1, A)
        driver.step(keep=(KeepRow(A, have - 1, BACK), KeepRow(B, have - 1, NEVER)))
        assert isinstance(driver.kept[NEVER], SnapshotMade)
        if isinstance(driver.kept[BACK], SnapshotMade):
            driver.assert_same_state(BACK, NEVER)
        else:
            refused.append(have)
        driver.device.release((BACK, NEVER))
        driver.decode(1, B)
    assert driver.tokens[A] == driver.tokens[B]
    # The step that encodes a row cannot be taken back: that is for good.
    start = getattr(kv, "start", 0)
    assert refused == [start] * (length <= start < length + WINDOW + 6)


def test_a_slot_put_back_wrongly_is_noticed(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails when the next token's keys stay where they are."""
    monkeypatch.setattr(backsteps, "_put_back", lambda ring, slot, length: backsteps.clone(ring))
    driver = drive("sliding")
    for row in (A, B):
        driver.start(row, prompt(20))
    driver.decode(2, B)
    driver.decode(3, A)
    driver.step(keep=(KeepRow(A, 21, BACK), KeepRow(B, 21, NEVER)))
    with pytest.raises(AssertionError):
        driver.assert_same_state(BACK, NEVER)


def test_what_is_held_never_changes_what_a_row_says(
    drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row goes on from its own state, whether one token back was copied or not."""
    said = []
    for holding in (True, False):
        driver = drive("sliding")
        if not holding:
            monkeypatch.setattr("mlx_troupe.runtime.engine.rows.hold", lambda caches: [])
        driver.start(A, prompt(30))
        for have in range(30, 50):
            driver.decode(1, A)
            if holding:
                driver.step(keep=(KeepRow(A, have - 1, BACK),))
                driver.device.release((BACK,))
        said.append(driver.tokens[A])
    assert said[0] == said[1]


def test_two_tokens_back_is_refused(drive: Callable[..., Driver]) -> None:
    """Only what one decode replaced is held."""
    driver = drive("sliding")
    driver.start(A, prompt(20))
    driver.decode(3, A)
    driver.step(keep=(KeepRow(A, 20, BACK),))
    assert isinstance(driver.kept[BACK], SnapshotSkipped)


async def test_the_next_turn_of_a_sliding_model_starts_where_an_end_token_ended_the_last() -> None:
    """An answer that ends by itself is found a step late; all of it is there for the next turn."""
    settings = Settings(folder("sliding"), "tiny", batch=2, queue=4, dtype="float32")
    ids = prompt(30)
    async with open_runtime(settings, tokenizer=WordTokenizer()) as runtime:
        await runtime.wait_ready()
        text, _ = await run(runtime, ask(*ids, max_tokens=24))
        said = tuple(map(int, text.split()))
        last = next(at for at in range(6, 20) if said[at] not in said[:at])
        stopping = ask(*ids, max_tokens=24, stop_token_ids=(said[last],))
        _, end = await run(runtime, stopping)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP
        turn = (*ids, *said[:last], *prompt(9, seed=4))
        text, end = await run(runtime, ask(*turn, max_tokens=8))
        assert isinstance(end, Finished)
        assert end.usage.cached_tokens == len(ids) + last
    cold = Settings(
        folder("sliding"), "tiny", batch=2, queue=4, dtype="float32", prompt_cache_bytes=0
    )
    async with open_runtime(cold, tokenizer=WordTokenizer()) as runtime:
        await runtime.wait_ready()
        assert (await run(runtime, ask(*turn, max_tokens=8)))[0] == text
