"""Ragged rows in one batch against each row alone with mlx-lm's own caches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from tiny import VOCAB, load_oracle, make_checkpoint, prompt

from mlx_troupe.runtime.device import RowId
from mlx_troupe.runtime.engine import batch as batch_module
from mlx_troupe.runtime.engine import layouts
from mlx_troupe.runtime.engine.attention import install_attention
from mlx_troupe.runtime.engine.batch import (
    CannotTrim,
    RaggedPrefill,
    RowBatch,
    why_not_batchable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.nn as nn

pytestmark = pytest.mark.mlx

TOLERANCE = 1e-3
WINDOW = 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-4-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "sliding": ("sliding", {}),
    "all-sliding-but-one": ("sliding", {"sliding_window": 7}),
    "mistral": ("llama", {"model_type": "mistral", "head_dim": 16}),
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], nn.Module]:
    """Tiny models by name, each made once."""
    made: dict[str, nn.Module] = {}

    def get(name: str) -> nn.Module:
        if name not in made:
            family, config = MODELS[name]
            path = tmp_path_factory.mktemp("models") / name
            made[name] = load_oracle(make_checkpoint(path, family, **config))
            object.__setattr__(made[name], "solo_runs", {})
            install_attention()
        return made[name]

    return get


def solo_prefill(model: nn.Module, ids: Sequence[int]) -> list[Any]:
    """mlx-lm's own caches after ``ids``, taken in as generate_step does."""
    caches = make_prompt_cache(model)
    if ids:
        model(mx.array([ids]), cache=caches)
        mx.eval([c.state[:2] for c in caches])
    return caches


def solo_logits(model: nn.Module, ids: tuple[int, ...], prompt_length: int) -> mx.array:
    """Teacher-forced logits [len(ids) - prompt_length, vocabulary], one token at a time."""
    known = model.solo_runs
    if (ids, prompt_length) not in known:
        caches = solo_prefill(model, ids[:prompt_length])
        steps = [model(mx.array([[token]]), cache=caches)[0, 0] for token in ids[prompt_length:]]
        known[ids, prompt_length] = mx.stack(steps)
        mx.eval(known[ids, prompt_length])
    return known[ids, prompt_length]


def assert_equal(got: mx.array, expected: mx.array) -> None:
    """Design §5: logits within 1e-3, ids equal wherever the solo gap is at least twice that."""
    assert bool(mx.isfinite(got).all().item()), "logits that are no numbers"
    difference = mx.abs(got - expected).max().item()
    assert difference <= TOLERANCE, f"logits differ by {difference}"
    top = mx.sort(expected, axis=-1)
    clear = (top[..., -1] - top[..., -2]) > 2 * TOLERANCE
    same = got.argmax(-1) == expected.argmax(-1)
    assert bool((same | ~clear).all().item()), "ids differ"


class Troupe:
    """A batch under test: rows with a fixed text each, compared at every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.batch = RowBatch(model)
        self.texts: dict[RowId, tuple[int, ...]] = {}
        self.starts: dict[RowId, int] = {}
        self.expected: dict[RowId, mx.array] = {}

    def add(self, row: int, length: int, steps: int = 32) -> RowId:
        """Join a row of ``length`` tokens, whose text goes on for ``steps`` more."""
        name, text = RowId(row), prompt(length + steps, seed=row)
        self.texts[name], self.starts[name] = text, length
        self.expected[name] = solo_logits(self.model, text, length)
        self.batch.join(name, solo_prefill(self.model, text[:length]))
        return name

    def drop(self, row: int, *, poisoned: bool = False) -> None:
        self.batch.leave(RowId(row), poisoned=poisoned)

    def forward(self, columns: int) -> mx.array:
        """One pass with each row's own next tokens, not yet committed."""
        caches = self.batch.begin(columns)
        tokens = [
            self.texts[row][self.batch.length(row) : self.batch.length(row) + columns]
            for row in self.batch.rows
        ]
        logits = self.model(mx.array(tokens), cache=caches)
        mx.eval(logits, self.batch.arrays)
        return logits

    def step(self, columns: int = 1, kept: Sequence[int] | None = None) -> None:
        """One pass, every row's logits compared with its solo run."""
        logits = self.forward(columns)
        for i, row in enumerate(self.batch.rows):
            at = self.batch.length(row) - self.starts[row]
            assert_equal(logits[i], self.expected[row][at : at + columns])
        self.batch.commit(columns if kept is None else kept)


LENGTHS = (3, 60, 17, 1, 126, 40, 0, 62)


def ragged_run(model: nn.Module) -> None:
    """Rows of many lengths: capacities and windows are crossed, rows join and leave."""
    troupe = Troupe(model)
    for row, length in enumerate(LENGTHS[:4]):
        troupe.add(row, length)
    for _ in range(6):
        troupe.step()
    for row, length in enumerate(LENGTHS[4:], 4):
        troupe.add(row, length)
    troupe.step()
    troupe.step(4)
    troupe.drop(1)
    troupe.drop(4)
    for _ in range(6):
        troupe.step()
    troupe.drop(0)
    troupe.add(9, 2)
    troupe.step(4)
    for _ in range(8):
        troupe.step()


class WholeStep(layouts.Step):
    """A step as GPUs get it: attention reads whole capacities, by the fused kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_cpu = False


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("step", [layouts.Step, WholeStep], ids=["filled", "whole"])
def test_ragged_rows_equal_solo_rows(
    models: Callable[[str], nn.Module], name: str, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins, leaves, capacity moves and four columns at once leave every logit as it was."""
    monkeypatch.setattr(batch_module, "Step", step)
    ragged_run(models(name))


@pytest.mark.parametrize("name", ["llama", "llama-4-kv-heads", "sliding"])
@pytest.mark.parametrize("rows", [2, 4])
def test_as_many_rows_as_kv_heads(models: Callable[[str], nn.Module], name: str, rows: int) -> None:
    """A mask that is broadcast along the wrong axis shows when rows and key heads are as many."""
    troupe = Troupe(models(name))
    for row in range(rows):
        troupe.add(row, 5 + 9 * row)
    troupe.step()
    troupe.step(4)
    troupe.step()


def test_a_step_keeps_only_what_is_committed(models: Callable[[str], nn.Module]) -> None:
    """Columns taken back by the commit are computed again, with equal logits, in rings too."""
    troupe = Troupe(models("sliding"))
    for row, length in enumerate((2, 13, 30, 61)):
        troupe.add(row, length, steps=52)
    draw = random.Random(5)
    for _ in range(12):
        troupe.step(4, [draw.randrange(5) for _ in troupe.batch.rows])


def test_random_joins_leaves_and_steps(models: Callable[[str], nn.Module]) -> None:
    """Twenty random moves on the sliding model, every logit compared."""
    troupe = Troupe(models("sliding"))
    draw = random.Random(11)
    for move in range(20):
        rows = troupe.batch.rows
        if len(rows) > 1 and draw.random() < 0.4:
            troupe.drop(draw.choice(rows))
        else:
            troupe.add(100 + move, draw.randrange(70), steps=50)
        troupe.step(draw.choice((1, 1, 2)))


@pytest.mark.parametrize("name", ["llama", "sliding", "all-sliding-but-one"])
@pytest.mark.parametrize("length", [0, 1, 6, 16, 17, 33, 40, 70])
def test_an_exported_row_goes_on_alone(
    models: Callable[[str], nn.Module], name: str, length: int
) -> None:
    """What export returns continues, one token or several at a time, as if never batched."""
    model = models(name)
    troupe = Troupe(model)
    row = troupe.add(1, length)
    troupe.add(2, 21)
    for _ in range(5):
        troupe.step()
    text, expected = troupe.texts[row], troupe.expected[row]
    for cut in (length + 5, length + 3, length):
        caches = troupe.batch.export(row, cut)
        mx.eval([c.state[:2] for c in caches if c.keys is not None])
        assert all(c.offset == cut for c in caches)
        assert all(c.keys is None or c.keys.shape[2] <= cut for c in caches)
        logits = [model(mx.array([text[cut : cut + 3]]), cache=caches)[0]]
        logits += [model(mx.array([[token]]), cache=caches)[0] for token in text[cut + 3 : cut + 7]]
        logits.append(model(mx.array([text[cut + 7 : cut + 10]]), cache=caches)[0])
        at = cut - length
        assert_equal(mx.concatenate(logits), expected[at : at + 10])
    troupe.step()


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_row_comes_back_after_export(models: Callable[[str], nn.Module], name: str) -> None:
    """Leaving with an export and joining with it again changes nothing, cut or whole."""
    troupe = Troupe(models(name))
    for row, length in enumerate((4, 30, 62)):
        troupe.add(row, length)
    for _ in range(3):
        for row in troupe.batch.rows:
            length = troupe.batch.length(row)
            caches = troupe.batch.export(row, length)
            troupe.batch.leave(row)
            troupe.batch.join(row, caches)
            assert troupe.batch.length(row) == length
        troupe.step()
        troupe.step(2)


@pytest.mark.parametrize("length", [3, 15, 16, 17, 31, 32, 33, 50, 90])
@pytest.mark.parametrize("singles", [0, 1, 5, 20])
def test_every_state_of_a_rotating_cache_joins(
    models: Callable[[str], nn.Module], length: int, singles: int
) -> None:
    """Unwrapped, wrapped, longer than its window: a lone sliding row joins from any state."""
    model = models("sliding")
    troupe = Troupe(model)
    text = prompt(length + singles + 6, seed=length)
    caches = solo_prefill(model, text[:length])
    for token in text[length : length + singles]:
        model(mx.array([[token]]), cache=caches)
    row = RowId(0)
    troupe.texts[row], troupe.starts[row] = text, length + singles
    troupe.expected[row] = solo_logits(model, text, length)[singles:]
    troupe.batch.join(row, caches)
    again = troupe.batch.export(row, length + singles)
    assert_equal(model(mx.array([text[length + singles :]]), cache=again)[0], troupe.expected[row])
    for _ in range(6):
        troupe.step()


def test_a_wrapped_row_is_cut_by_up_to_the_slack(models: Callable[[str], nn.Module]) -> None:
    """After the ring has wrapped, the last 16 tokens can be taken back, and not more."""
    model = models("sliding")
    troupe = Troupe(model)
    row = troupe.add(0, 1, steps=90)
    for _ in range(70):
        troupe.step()
    held = troupe.batch.length(row)
    caches = troupe.batch.export(row, held - layouts.SLACK)
    text = troupe.texts[row][held - layouts.SLACK : held]
    logits = [model(mx.array([[token]]), cache=caches)[0] for token in text]
    at = held - layouts.SLACK - 1
    assert_equal(mx.concatenate(logits), troupe.expected[row][at : at + layouts.SLACK])
    with pytest.raises(CannotTrim):
        troupe.batch.export(row, held - layouts.SLACK - 1)


def test_exports_are_copies(models: Callable[[str], nn.Module]) -> None:
    """Neither the batch's later steps nor the lone cache's reach each other's bytes."""
    model = models("llama")
    troupe = Troupe(model)
    row = troupe.add(3, 64)
    lone = solo_prefill(model, troupe.texts[row][:64])
    troupe.batch.leave(row)
    troupe.batch.join(row, lone)
    model(mx.array([[5]]), cache=lone)
    troupe.step()
    caches = troupe.batch.export(row, 65)
    before = mx.array(caches[0].keys)
    mx.eval(before)
    for _ in range(3):
        troupe.step()
    assert mx.array_equal(before, caches[0].keys).item()
    assert all(type(cache) is KVCache and cache.keys.shape[2] == 65 for cache in caches)


def test_a_poisoned_row_hurts_nobody(models: Callable[[str], nn.Module]) -> None:
    """NaN in one row stays there, and the next user of its slot computes right."""
    model = models("sliding")
    for poisoned_row in (0, 1, 2):
        troupe = Troupe(model)
        for row, length in enumerate((30, 25, 40)):
            troupe.add(row, length)
        troupe.step()
        bad = RowId(poisoned_row)
        caches = troupe.batch.export(bad, troupe.batch.length(bad))
        for cache in caches:
            cache.keys, cache.values = cache.keys * float("nan"), cache.values * float("nan")
        troupe.batch.leave(bad)
        troupe.batch.join(bad, caches)
        logits = troupe.forward(1)
        for i, row in enumerate(troupe.batch.rows):
            assert bool(mx.isfinite(logits[i]).all().item()) is (row != bad)
        troupe.batch.commit(1)
        troupe.drop(bad, poisoned=True)
        troupe.step()
        troupe.add(7, 3)
        troupe.step(4)
        troupe.step()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_lone_rows_are_prefilled_together(models: Callable[[str], nn.Module], name: str) -> None:
    """Right-padded rows with and without a past fill their own caches as if alone."""
    model = models(name)
    befores, counts = (0, 0, 7, 30), (5, 1, 12, 3)
    texts = [
        prompt(b + c + 4, seed=i) for i, (b, c) in enumerate(zip(befores, counts, strict=True))
    ]
    caches = [solo_prefill(model, text[:b]) for text, b in zip(texts, befores, strict=True)]
    tokens = [
        (*text[b : b + c], *(0,) * (max(counts) - c))
        for text, b, c in zip(texts, befores, counts, strict=True)
    ]
    together = model(mx.array(tokens), cache=RaggedPrefill(caches, counts).caches)
    for i, (text, b, c) in enumerate(zip(texts, befores, counts, strict=True)):
        expected = solo_logits(model, text, b)
        assert_equal(together[i, :c], expected[:c])
        assert all(cache.offset == b + c for cache in caches[i])
        assert_equal(model(mx.array([text[b + c :]]), cache=caches[i])[0], expected[c:])


def test_sliding_rows_are_not_prefilled_together(models: Callable[[str], nn.Module]) -> None:
    """Only plain caches take a padded pass."""
    with pytest.raises(TypeError):
        RaggedPrefill([solo_prefill(models("sliding"), (3, 4))], [2])


def blank_caches(model: nn.Module, length: int) -> list[Any]:
    """Plain caches of zeros: sizes matter here, values do not."""
    caches = make_prompt_cache(model)
    for cache in caches:
        cache.update_and_fetch(mx.zeros((1, 2, length, 16)), mx.zeros((1, 2, length, 16)))
    return caches


def test_memory_follows_need(models: Callable[[str], nn.Module]) -> None:
    """Fifteen rows of 60 tokens and one of 4,000 hold at most 2.5 × what they need."""
    model = models("llama")
    batch = RowBatch(model)
    short, long = blank_caches(model, 60), blank_caches(model, 4000)
    for row in range(15):
        batch.join(RowId(row), short)
    batch.join(RowId(15), long)
    logits = model(mx.array([[3]] * 16), cache=batch.begin(1))
    mx.eval(logits)
    batch.commit(1)
    per_token = long[0].keys[..., :1, :].nbytes * 2 * len(long)
    assert 0 < batch.nbytes <= 2.5 * per_token * (15 * 61 + 4001)
    for row in range(15):
        batch.leave(RowId(row))
    mx.eval(model(mx.array([[3]]), cache=batch.begin(1)))
    assert batch.nbytes <= 2 * per_token * 4002
    batch.leave(RowId(15))
    assert batch.nbytes == 0
    assert batch.rows == ()


def test_rings_hold_no_more_than_window_and_slack(models: Callable[[str], nn.Module]) -> None:
    """A sliding layer of a long row is as long as its ring."""
    model = models("sliding")
    batch = RowBatch(model)
    batch.join(RowId(0), solo_prefill(model, prompt(300)))
    mx.eval(model(mx.array([[3]]), cache=batch.begin(1)))
    depths = {array.shape[2] for array in batch.arrays}
    assert depths == {512, WINDOW + layouts.SLACK}
    with pytest.raises(ValueError, match="columns"):
        batch.begin(layouts.SLACK + 2)


def leak_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask lets one slot behind each row's last token in."""
    honest = layouts.Step._make_mask

    def leaky(self: Any, segment: Any, used: int, *rest: Any) -> mx.array:
        mask = honest(self, segment, used, *rest)
        first = self.offsets[segment.start : segment.stop].reshape(-1, 1, 1, 1)
        return mask | (mx.arange(used) == first + self.columns)

    monkeypatch.setattr(layouts.Step, "_make_mask", leaky)


def lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's keys are not written in one step."""
    honest, calls = layouts._scatter, [0]

    def forgetful(buffers: Any, segment: Any, depth: int, *rest: Any) -> None:
        calls[0] += 1
        before = mx.array(buffers[segment.capacity]) if segment.capacity in buffers else None
        honest(buffers, segment, depth, *rest)
        if calls[0] == 10 and before is not None:
            buffers[segment.capacity] = before

    monkeypatch.setattr(layouts, "_scatter", forgetful)


def forget_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers see all that their ring holds."""
    honest = layouts.Step.mask

    def boundless(self: Any, segment: Any, used: int, ring: Any, window: Any, *rest: Any) -> Any:
        return honest(self, segment, used, ring, None, *rest)

    monkeypatch.setattr(layouts.Step, "mask", boundless)


@pytest.mark.parametrize("mutant", [leak_a_slot, lose_a_token, forget_the_window])
def test_the_comparison_catches_broken_layouts(
    models: Callable[[str], nn.Module],
    mutant: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leaked slot, a lost token and a missing window each fail the very run that passes."""
    model = models("sliding")
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differ"):
        ragged_run(model)


@pytest.mark.parametrize("name", MODELS)
def test_good_families_may_share(models: Callable[[str], nn.Module], name: str) -> None:
    """The check at load passes the families of this file."""
    assert why_not_batchable(models(name)) is None


def test_recurrent_state_is_refused_by_name(tmp_path: Any) -> None:
    """A model whose state has no layout runs row by row, and the reason says which."""
    reason = why_not_batchable(load_oracle(make_checkpoint(tmp_path / "m", "mamba")))
    assert reason is not None
    assert "mamba" in reason
    assert "ArraysCache" in reason


def test_own_attention_is_refused_by_name(tmp_path: Any) -> None:
    """gemma2 computes its scores itself; a mask of ours would be silently wrong."""
    path = make_checkpoint(tmp_path / "m", "llama", model_type="gemma2", head_dim=16)
    reason = why_not_batchable(load_oracle(path))
    assert reason is not None
    assert "gemma2" in reason
    assert "attention" in reason


def test_the_self_check_finds_a_broken_layout(
    models: Callable[[str], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that disagree at load are refused; so are rows that raise."""
    with monkeypatch.context() as patch:
        leak_a_slot(patch)
        assert "disagree" in (why_not_batchable(models("llama")) or "")
    monkeypatch.setattr(layouts.RowsCache, "make_mask", lambda *_, **__: mx.zeros((1, 1)))
    assert "fail" in (why_not_batchable(models("llama")) or "")


def test_strangers_and_wrong_states_are_errors(models: Callable[[str], nn.Module]) -> None:
    """Joining twice, leaving unknown, exporting too much and foreign caches are refused."""
    model = models("sliding")
    batch = RowBatch(model)
    batch.join(RowId(1), solo_prefill(model, (3, 4, 5)))
    with pytest.raises(ValueError, match="already"):
        batch.join(RowId(1), solo_prefill(model, (3,)))
    with pytest.raises(KeyError):
        batch.leave(RowId(2))
    with pytest.raises(ValueError, match="holds 3"):
        batch.export(RowId(1), 4)
    with pytest.raises(TypeError):
        batch.join(RowId(3), [KVCache() for _ in range(3)])
    with pytest.raises(TypeError):
        batch.join(RowId(3), [RotatingKVCache(WINDOW, keep=4) for _ in range(3)])
    assert batch.rows == (1,)
    assert max(prompt(50)) < VOCAB
