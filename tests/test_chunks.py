"""Prefill chunks keep to their time at any depth, whatever model and machine they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from core_rig import Rig
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.scheduling.chunks import MIN_CHUNK, STALL_SECONDS, ChunkSizer


@dataclass(frozen=True)
class Machine:
    """What passes really cost: in seconds by themselves, for each token, and for a decode.

    ``doubling`` is the depth at which a token costs twice as much.
    """

    fixed: float
    each: float
    decode: float
    doubling: float

    def seconds(self, tokens: int, depth: int) -> float:
        """Of a step that prefills so many tokens behind ``depth`` others and decodes."""
        mean = depth + tokens / 2
        return self.fixed + self.each * tokens * (1 + mean / self.doubling) + self.decode

    def bound(self, depth: int) -> float:
        """Seconds that a step is meant to take: the stall, or what no smaller one would mend."""
        least = self.fixed + self.each * MIN_CHUNK * (1 + depth / self.doubling)
        return max(STALL_SECONDS, 2 * self.decode, 2 * self.fixed, least) + self.decode


def machines() -> st.SearchStrategy[Machine]:
    """From a GPU on which nothing is noticed to a processor that takes seconds for a hundred."""

    def made(fixed: float, each: float, share: float, doubling: float) -> Machine:
        return Machine(10**fixed, 10**each, 10**fixed * share, doubling)

    depth = st.floats(2.7, 4.8).map(lambda power: float(10**power))
    return st.builds(
        made,
        st.floats(-2.5, -0.7),
        st.floats(-5.0, -2.0),
        st.floats(0.5, 2.0),
        depth | st.just(math.inf),
    )


def longest(machine: Machine, jobs: list[tuple[int, int]], noise: float, seed: int) -> float:
    """The longest step of some prefills beside one running row, in its bound; the first is free.

    A job is the depth where it begins and its tokens.
    """
    draw, sizer, worst = Random(seed), ChunkSizer(), 0.0
    sizer.saw(prefilled=0, decoded=1, seconds=machine.decode)
    for number, (start, tokens) in enumerate(jobs):
        depth = start
        while depth < start + tokens:
            count = sizer.budget(pending=1, running=1, depth=depth)
            count = min(count, start + tokens - depth)
            took = machine.seconds(count, depth) * (1 + noise * draw.uniform(-1, 1))
            if number:
                worst = max(worst, took / machine.bound(depth))
            sizer.saw(prefilled=count, decoded=1, seconds=took, pairs=count * (depth + count // 2))
            depth += count
    return worst


JOBS = st.lists(
    st.tuples(st.just(0) | st.integers(0, 48_000), st.integers(20, 2_000)), min_size=1, max_size=6
)


@given(machines(), JOBS, st.sampled_from([0.0, 0.1]), st.integers(0, 1 << 30))
def test_no_step_takes_much_longer_than_it_is_meant_to(
    machine: Machine, jobs: list[tuple[int, int]], noise: float, seed: int
) -> None:
    """Behind a long prompt, at its end, behind one that was kept, and at a beginning again.

    A depth that was not seen before, or not lately, is met with caution, and noise in what steps
    took is not mistaken for a law.
    """
    assert longest(machine, [(0, 16_000), *jobs], noise, seed) < 2.5


def test_the_scheduler_says_where_its_chunks_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step how deep they begin, and behind it how far back their tokens looked."""
    rig = Rig()
    asked: list[int] = []
    seen: list[tuple[int, float]] = []
    budget = rig.core.sizer.budget

    def watched_budget(*, depth: int = 0, **rest: Any) -> int:
        asked.append(depth)
        return min(256, budget(depth=depth, **rest))

    def watched_saw(*, prefilled: int, pairs: float = 0.0, **rest: Any) -> None:
        if prefilled:
            seen.append((prefilled, pairs))

    monkeypatch.setattr(rig.core.sizer, "budget", watched_budget)
    monkeypatch.setattr(rig.core.sizer, "saw", watched_saw)
    rig.submit(tuple(range(1, 802)), limit=1)
    rig.drain()
    assert asked == [0, 256, 512, 768]
    assert seen == [(256, 256 * 128), (256, 256 * 384), (256, 256 * 640), (32, 32 * 784)]
