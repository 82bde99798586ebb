"""Rows with grammars on the MLX device: tiny checkpoints whose tokens are the ASCII characters."""

from __future__ import annotations

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tiny import EOS, VOCAB, make_checkpoint, prompt

from mlx_troupe.actors.device_messages import Broke, Launch, Settle, Settled, WorkerEvent
from mlx_troupe.actors.worker import Conductor
from mlx_troupe.runtime.engine import drawing, masks
from mlx_troupe.runtime.engine.executor import MLXDevice
from mlx_troupe.runtime.engine.masks import MaskMaker
from mlx_troupe.runtime.engine.opening import Options
from mlx_troupe.runtime.grammars import (
    ChoiceGrammar,
    ContextFreeGrammar,
    Grammar,
    JsonGrammar,
    RegexGrammar,
)
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowFailed, RowId, StartRow, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.text import matching
from mlx_troupe.runtime.text.matching import GrammarCompiler, MatchFailed
from mlx_troupe.runtime.text.testing import ByteTokenizer

pytestmark = pytest.mark.mlx

ANYTHING = RegexGrammar("(?s:.*)")
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "boolean"},
    {"enum": ["red", "green", 7]},
    {"type": "integer", "minimum": -50, "maximum": 999},
    {"type": "string", "maxLength": 6},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"const": "x"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"const": 1}], "items": False}]},
    {"type": "string", "pattern": "^[a-c]{3}-[0-9]{2}$"},
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """Of a tokenizer whose bytes beyond ASCII the model lacks."""
    return GrammarCompiler(ByteTokenizer(), VOCAB, frozenset({EOS}))


class Stage:
    """A device led by the worker's own conductor, and what its rows say."""

    def __init__(self, path: Path) -> None:
        self.device = MLXDevice(Options(path, name="tiny", dtype="float32"))
        self.device.open()
        self.tokens: defaultdict[RowId, list[int]] = defaultdict(list)
        self.ended: dict[RowId, int] = {}
        self.failed: list[RowFailed] = []
        self._steps = 0
        self._conductor = Conductor(self.device, self._hear)

    def start(self, row: RowId, ids: Sequence[int], sampling: Sampling, matcher: Any) -> None:
        """Start and prefill a row."""
        start = StartRow(row, tuple(ids), sampling, Cold(), matcher=matcher)
        self.step(start=(start,), prefill=(PrefillRow(row, len(ids) - 1),))

    def step(self, **parts: Any) -> None:
        """Launch a step; the one before it is settled on the way."""
        self._steps += 1
        self._conductor.perform(Launch(StepPlan(StepId(self._steps), **parts)))

    def decode(self, count: int, rows: Sequence[RowId]) -> None:
        """``count`` tokens for each row, all known at the end."""
        for _ in range(count):
            self.step(decode=tuple(rows))
        self._conductor.perform(Settle())

    def text(self, row: RowId) -> str:
        """What a row said up to the token that ended it."""
        said = self.tokens[row][: self.ended.get(row)]
        return "".join(chr(token) for token in said if token != EOS)

    def _hear(self, event: WorkerEvent) -> None:
        match event:
            case Settled(done, _):
                for sampled in done.sampled:
                    self.tokens[sampled.row].append(sampled.token)
                    if sampled.ends:
                        assert sampled.row not in self.ended, "a row ends twice"
                        self.ended[sampled.row] = len(self.tokens[sampled.row])
                self.failed += done.failed
            case Broke(error):
                raise error
            case _:
                raise AssertionError(event)


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def stage(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Stage]]:
    """Opens stages and closes their devices. As on a GPU masks are begun ahead of the launch."""
    opened: list[Stage] = []

    def open_stage(family: str = "llama") -> Stage:
        opened.append(Stage(make_checkpoint(tmp_path_factory.mktemp(family), family)))
        if request.param == "as on a GPU":
            forward = opened[-1].device._forward
            assert forward is not None
            forward._drawing._launches = True
        return opened[-1]

    yield open_stage
    for each in opened:
        each.device.close()


def run(
    stage: Stage,
    grammars: Mapping[int, Grammar],
    compiler: GrammarCompiler,
    *,
    rows: int = 12,
    tokens: int = 40,
    sampling: Callable[[int], Sampling] = lambda n: Sampling(),
) -> dict[int, list[int]]:
    """Decode rows together, some with grammars; all of them in every step, complete or not."""
    for n in range(rows):
        matcher = compiler.compile(grammars[n]) if n in grammars else None
        stage.start(RowId(n), prompt(5 + n, seed=n), sampling(n), matcher)
    stage.decode(tokens, [RowId(n) for n in range(rows)])
    return {n: stage.tokens[RowId(n)] for n in range(rows)}


def mixed(n: int) -> Sampling:
    """Greedy rows and seeded ones with every filter, in turn."""
    if n % 3 == 0:
        return Sampling()
    penalty = 1.3 if n % 2 else 0.0
    return Sampling(
        temperature=1.0, seed=n, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=penalty
    )


def test_each_row_follows_its_schema_and_free_rows_do_not_notice(
    stage: Callable[..., Stage], compiler: GrammarCompiler
) -> None:
    """Eight schemas and four free rows in one batch; the free rows' tokens are what they were."""
    grammars = {n: JsonGrammar(json.dumps(s)) for n, s in enumerate(SCHEMAS)}
    bound, free = stage(), stage()
    with_grammars = run(bound, grammars, compiler, sampling=mixed, tokens=60)
    without = run(free, {}, compiler, sampling=mixed, tokens=60)
    assert bound.failed == free.failed == []
    assert {n: with_grammars[n] for n in range(8, 12)} == {n: without[n] for n in range(8, 12)}
    assert not free.ended
    assert len(bound.ended) >= 6
    for row in bound.ended:
        value = json.loads(bound.text(row))
        jsonschema_rs.validate(SCHEMAS[row], value)
    # Those that are under way are at least the beginning of an answer.
    for n in set(range(8)) - {int(row) for row in bound.ended}:
        matcher = compiler.compile(grammars[n])
        assert not any(matcher.take(token) for token in with_grammars[n])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5, top_p=0.9)])
def test_a_grammar_that_allows_everything_changes_nothing(
    stage: Callable[..., Stage], compiler: GrammarCompiler, sampling: Sampling
) -> None:
    """Its tokens are drawn from the very numbers that free rows' tokens are drawn from."""
    bound = run(
        stage(), dict.fromkeys(range(4), ANYTHING), compiler, rows=4, sampling=lambda _: sampling
    )
    free = run(stage(), {}, compiler, rows=4, sampling=lambda _: sampling)
    # Up to an end token, behind which the grammar has nothing more to say.
    for n in range(4):
        last = free[n].index(EOS) + 1 if EOS in free[n] else None
        assert bound[n][:last] == free[n][:last]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_rows_that_run_alone_have_grammars_too(
    stage: Callable[..., Stage], compiler: GrammarCompiler, family: str
) -> None:
    """One row in all, and rows of a model whose rows cannot share a forward pass."""
    grammars: dict[int, Grammar] = {
        0: JsonGrammar(json.dumps(SCHEMAS[5]), any_whitespace=False),
        1: ChoiceGrammar(("yes", "no", "not at all")),
    }
    first, both = stage(family), stage(family)
    alone = run(first, grammars, compiler, rows=1, tokens=30)
    run(both, grammars, compiler, rows=3, tokens=30)
    assert json.loads(first.text(RowId(0)))["b"] == "x"
    assert first.text(RowId(0)) == both.text(RowId(0))
    assert both.text(RowId(1)) in ("yes", "no", "not at all")
    assert len(alone[0]) == 30


def test_a_matcher_that_fails_takes_its_own_row_along_and_no_other(
    stage: Callable[..., Stage], compiler: GrammarCompiler
) -> None:
    """It failed before its first mask, or at a token; the others write what they write without."""
    broken, stubborn = compiler.compile(ANYTHING), compiler.compile(ANYTHING)
    with pytest.raises(MatchFailed):
        broken.take(200)
    grammar = JsonGrammar(json.dumps(SCHEMAS[5]), any_whitespace=False)
    failing, whole = stage(), stage()
    for each in (failing, whole):
        each.start(RowId(1), prompt(9), Sampling(), compiler.compile(grammar))
        each.start(RowId(2), prompt(7), Sampling(), None)
    failing.start(RowId(3), prompt(5), Sampling(), broken)
    failing.start(RowId(4), prompt(5), Sampling(), stubborn)
    failing.decode(3, [RowId(n) for n in (1, 2, 3, 4)])
    whole.decode(3, [RowId(1), RowId(2)])
    assert [each.row for each in failing.failed][:1] == [RowId(3)]
    with pytest.raises(MatchFailed):
        stubborn.take(200)
    failing.decode(30, [RowId(1), RowId(2), RowId(4)])
    whole.decode(30, [RowId(1), RowId(2)])
    assert {each.row for each in failing.failed} == {RowId(3), RowId(4)}
    assert all(each.reason for each in failing.failed)
    assert failing.text(RowId(1)) == whole.text(RowId(1))
    assert json.loads(failing.text(RowId(1)))["b"] == "x"


def test_a_grammar_beyond_the_engine_s_limits_takes_its_own_row_along_and_is_named(
    stage: Callable[..., Stage], compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a token or at a mask, among rows and alone; the others write on."""
    wide = "|".join(f'"no {n}"' for n in range(2100))
    broken = compiler.compile(ContextFreeGrammar(f'start: "hello" list\nlist: {wide}', "field"))
    monkeypatch.setattr(matching, "MAX_ITEMS", 10)
    narrow = GrammarCompiler(ByteTokenizer(), VOCAB, frozenset({EOS}))
    masked = narrow.compile(ContextFreeGrammar('start: a\na: a a | "o"\n', "mask"))
    grammar = JsonGrammar(json.dumps(SCHEMAS[5]), any_whitespace=False)
    together, alone = stage(), stage()
    together.start(RowId(1), prompt(9), Sampling(), compiler.compile(grammar))
    together.start(RowId(2), prompt(5), Sampling(), broken.copy())
    together.start(RowId(3), prompt(6), Sampling(), masked)
    together.decode(60, [RowId(n) for n in (1, 2, 3)])
    alone.start(RowId(2), prompt(5), Sampling(), broken)
    alone.decode(30, [RowId(2)])
    # Later plans name rows that are gone.
    first = {each.row: each.param for each in reversed(together.failed)}
    assert first == {RowId(2): "field", RowId(3): "mask"}
    assert alone.failed[0].param == "field"
    assert together.text(RowId(2)) == alone.text(RowId(2)) == "hell"
    assert json.loads(together.text(RowId(1)))["b"] == "x"


def test_masks_are_begun_as_soon_as_their_tokens_are_under_way(
    stage: Callable[..., Stage],
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """On a GPU right after these, ahead of the next launch; otherwise when they have been read."""
    order: list[str] = []
    begin, start = MaskMaker.begin, drawing.start

    def note_begin(self: MaskMaker, matchers: Any) -> Any:
        order.append("masks")
        return begin(self, matchers)

    def note_start(*arrays: Any) -> None:
        order.append("start")
        start(*arrays)

    opened = stage()
    opened.start(RowId(1), prompt(9), Sampling(), compiler.compile(ANYTHING))
    opened.start(RowId(2), prompt(9), Sampling(), None)
    opened.decode(0, ())
    device, both = opened.device, (RowId(1), RowId(2))
    monkeypatch.setattr(MaskMaker, "begin", note_begin)
    monkeypatch.setattr(drawing, "start", note_start)
    for step in (97, 98, 99):
        device.launch(StepPlan(StepId(step), decode=both))
        if step > 97:
            device.settle()
        device.push()
    device.settle()
    # In each step the forward pass is started, then the draw.
    ahead = ["masks", *["start", "start", "masks"] * 3]
    assert order == (ahead if "GPU" in request.node.name else ["masks", "start", "start"] * 3)


def test_a_launch_waits_for_no_matcher(
    stage: Callable[..., Stage],
    compiler: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """On a GPU matchers follow beside the next launch, and a settle waits for them."""
    launched = threading.Event()
    take = drawing._take

    def take_late(row: Any, token: int) -> Any:
        assert launched.wait(10), "the launch waits for the matchers"
        return take(row, token)

    opened = stage()
    opened.start(RowId(1), prompt(9), Sampling(), compiler.compile(ChoiceGrammar(("ab",))))
    opened.start(RowId(2), prompt(9), Sampling(), None)
    opened.decode(0, ())
    monkeypatch.setattr(drawing, "_take", take_late)
    device, both = opened.device, (RowId(1), RowId(2))
    device.launch(StepPlan(StepId(98), decode=both))
    device.push()
    if "CPU" in request.node.name:
        launched.set()
    device.launch(StepPlan(StepId(99), decode=both))
    launched.set()
    sampled = [device.settle().sampled, device.settle().sampled]
    tokens = [next(each for each in step if each.row == RowId(1)) for step in sampled]
    assert [chr(each.token) for each in tokens] == ["a", "b"]
    assert [each.ends for each in tokens] == [False, True]


def test_a_row_that_comes_later_gets_its_masks_beside_the_others(
    stage: Callable[..., Stage], compiler: GrammarCompiler
) -> None:
    """Some masks are under way then and some are not, and the batch changes its order."""
    opened = stage()
    opened.start(RowId(1), prompt(9), Sampling(), compiler.compile(ChoiceGrammar(("abcdef",))))
    opened.start(RowId(2), prompt(7), Sampling(), compiler.compile(ChoiceGrammar(("ghijkl",))))
    opened.decode(2, [RowId(1), RowId(2)])
    opened.start(RowId(3), prompt(8), Sampling(), compiler.compile(ChoiceGrammar(("mnopqr",))))
    opened.decode(1, [RowId(2)])
    opened.decode(2, [RowId(3), RowId(2), RowId(1)])
    opened.decode(2, [RowId(1), RowId(3)])
    assert [opened.text(RowId(n)) for n in (1, 2, 3)] == ["abcdef", "ghijk", "mnop"]
    assert opened.ended == {RowId(1): 6}


def test_masks_are_made_while_the_forward_pass_runs(
    stage: Callable[..., Stage], compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the forward pass does not return before a mask is under way, and the other way round."""
    computing, masking = threading.Event(), threading.Event()
    start, make = drawing.start, MaskMaker._make

    def start_and_wait(*arrays: Any) -> None:
        computing.set()
        assert masking.wait(10), "no mask is made meanwhile"
        start(*arrays)

    def make_and_wait(self: MaskMaker, matchers: Any) -> Any:
        masking.set()
        assert computing.wait(10), "the forward pass waits for the mask"
        return make(self, matchers)

    opened = stage()
    opened.start(RowId(1), prompt(9), Sampling(), compiler.compile(ChoiceGrammar(("ab",))))
    opened.start(RowId(2), prompt(9), Sampling(), None)
    monkeypatch.setattr(drawing, "start", start_and_wait)
    monkeypatch.setattr(MaskMaker, "_make", make_and_wait)
    opened.decode(1, [RowId(1), RowId(2)])
    assert opened.text(RowId(1)) == "a"


def test_what_steps_wait_for_grammars_is_counted(
    stage: Callable[..., Stage], compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one wait for a step, however many of its rows have one; free rows wait for none."""
    seconds = itertools.count()
    monkeypatch.setattr(masks, "perf_counter", lambda: next(seconds))
    on = stage()
    on.start(RowId(0), prompt(5), Sampling(), None)
    on.decode(5, [RowId(0)])
    assert on.device.stats().grammar_seconds == 0
    for row in (1, 2):
        on.start(RowId(row), prompt(5 + row), Sampling(), compiler.compile(ANYTHING))
    on.decode(7, [RowId(n) for n in range(3)])
    assert on.device.stats().grammar_seconds == 7


def test_free_batches_never_wait_for_a_push(
    stage: Callable[..., Stage], compiler: GrammarCompiler
) -> None:
    """A grammar that has come to its end holds nobody up any more."""
    opened = stage()
    opened.start(RowId(1), prompt(9), Sampling(), compiler.compile(ChoiceGrammar(("ab",))))
    opened.start(RowId(2), prompt(9), Sampling(), None)
    opened.decode(2, [RowId(1), RowId(2)])
    assert opened.ended == {RowId(1): 2}
    device = opened.device
    device.launch(StepPlan(StepId(99), decode=(RowId(1), RowId(2))))
    assert all(drawn.reported is not None for drawn in device._steps[-1].drawn)
    device.push()
    device.settle()
