"""Our device against mlx-lm on the starter, bit by bit, and against the sets kept in goldens/.

Both sides run in processes of their own under the same BLAS, core type and threads; here their
answers are only compared. See ``goldens/regenerate.py`` for the scheme.
"""

from __future__ import annotations

import array
import base64
import copy
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
PRECISIONS = ("float32", "int4")
TOLERANCE = 1e-3
PATIENCE = 900  # seconds; a quiet machine needs 40
ORACLE_MAY_LOAD = re.compile(r"mlx_troupe(\.runtime(\.engine(\.blas)?|\.errors|\.store(\.\w+)?)?)?")
FIND_STARTER = """
from mlx_troupe.runtime.engine.blas import ensure_fast_blas
ensure_fast_blas()
from mlx_troupe.runtime.store.starter import ensure_starter
print(ensure_starter())
"""


@dataclass(frozen=True)
class GoldenSet:
    """A folder that ``regenerate.py`` wrote."""

    manifest: dict[str, Any]
    by_precision: dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Runs:
    """What mlx-lm and our device computed here, just now."""

    oracle: GoldenSet
    ours: dict[str, Any]


def read_set(folder: Path) -> GoldenSet:
    """Read a set; a missing file is an error."""
    sets = {p: json.loads((folder / f"{p}.json").read_text())["prompts"] for p in PRECISIONS}
    return GoldenSet(json.loads((folder / "manifest.json").read_text()), sets)


def committed_sets() -> list[GoldenSet]:
    """All sets that the repository keeps; there is at least one."""
    folders = sorted(file.parent for file in GOLDENS.glob("*/manifest.json"))
    assert folders, f"no set is left in {GOLDENS}"
    return [read_set(folder) for folder in folders]


def start(work: Path, script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a script of goldens/ with a folder of its own for what MLX compiles on the spot."""
    work.mkdir()
    return subprocess.Popen(
        [sys.executable, str(GOLDENS / script), *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(work)},
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a script; whatever is wrong with it fails the test, with its output."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """mlx-lm and our device side by side: most of the time is one thread of each."""
    work = tmp_path_factory.mktemp("goldens")
    found = subprocess.run(
        [sys.executable, "-c", FIND_STARTER], capture_output=True, text=True, timeout=PATIENCE
    )
    assert found.returncode == 0, found.stderr
    model = found.stdout.splitlines()[-1]
    sides = [
        start(work / "a", "regenerate.py", "--model", model, "--out", work / "set"),
        start(work / "b", "replay.py", "--model", model, "--out", work / "ours.json"),
    ]
    try:
        for side in sides:
            finish(side)
    finally:
        for side in sides:
            side.kill()
    return Runs(read_set(work / "set"), json.loads((work / "ours.json").read_text()))


def differences(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> list[str]:
    """Every prompt and position where ids or logits digests differ, in words."""
    names = [prompt["name"] for prompt in expected], [prompt["name"] for prompt in got]
    if names[0] != names[1]:
        return [f"prompts {names[1]} instead of {names[0]}"]
    found = []
    for one, other in zip(expected, got, strict=True):
        for what in ("ids", "digests"):
            if len(one[what]) != len(other[what]):
                found.append(f"{one['name']}: {len(other[what])} {what}, not {len(one[what])}")
            pairs = enumerate(zip(one[what], other[what], strict=False))
            found += [f"{one['name']}: {what} at {n}" for n, (a, b) in pairs if a != b]
    return found


def far_apart(expected: list[dict[str, Any]], got: list[dict[str, Any]]) -> list[str]:
    """As :func:`differences` for sets of unlike machines: equal ids, logits within 1e-3."""
    found = [line for line in differences(expected, got) if ": digests at " not in line]
    for one, other in zip(expected, got, strict=False):
        for place, (a, b) in enumerate(zip(one["samples"], other["samples"], strict=False)):
            pairs = zip(floats(a), floats(b), strict=True)
            # Written so that a NaN is far from everything.
            if not all(abs(x - y) <= TOLERANCE for x, y in pairs):
                found.append(f"{one['name']}: logits at {place}")
    return found


def floats(text: str) -> array.array[float]:
    """Numbers of one sample."""
    values = array.array("f", base64.b64decode(text))
    if sys.byteorder == "big":
        values.byteswap()
    return values


@pytest.mark.golden
@pytest.mark.starter
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_lone_row_is_bit_exact_with_mlx_lm(runs: Runs, precision: str) -> None:
    """100 greedy ids and 100 vectors of logits are those of generate_step, to the last bit."""
    expected = runs.oracle.by_precision[precision]
    assert sum(len(prompt["ids"]) for prompt in expected) == 100
    assert sum(len(prompt["digests"]) for prompt in expected) == 100
    assert not differences(expected, runs.ours[precision])


@pytest.mark.golden
@pytest.mark.starter
def test_both_sides_ran_alike_and_the_oracle_alone(runs: Runs) -> None:
    """The same BLAS, core type and threads; none of our engine beside mlx-lm."""
    manifest = runs.oracle.manifest
    assert manifest["blas"] == runs.ours["blas"]
    assert all(ORACLE_MAY_LOAD.fullmatch(name) for name in manifest["imported_of_ours"])


@pytest.mark.golden
@pytest.mark.starter
def test_committed_sets_still_hold(
    runs: Runs, record_property: Callable[[str, object], None]
) -> None:
    """Equal bits under the same key; under an unknown one equal ids and logits within 1e-3."""
    here = runs.oracle.manifest
    kept = committed_sets()
    for one in kept:
        assert one.manifest["weights_sha256"] == here["weights_sha256"], "another model"
    same = [one for one in kept if one.manifest["key"] == here["key"]]
    compare = differences if same else far_apart
    for one in same or kept:
        for precision in PRECISIONS:
            where = f"{one.manifest['slug']}, {precision}"
            expected, got = one.by_precision[precision], runs.oracle.by_precision[precision]
            assert not compare(expected, got), where
    known = "known: equal bits" if same else f"unknown: equal ids, logits within {TOLERANCE}"
    record_property("note", f"goldens: the key {here['slug']} is {known}")


@pytest.mark.golden
def test_committed_sets_are_whole() -> None:
    """Each set holds what its manifest says, for today's prompts, under the name of its key."""
    for folder in sorted(file.parent for file in GOLDENS.glob("*/manifest.json")):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["slug"] == folder.name
        assert manifest["sets"] == {p: sha256(folder / f"{p}.json") for p in PRECISIONS}
        assert manifest["prompts_sha256"] == sha256(GOLDENS / "prompts.json")
        assert all(ORACLE_MAY_LOAD.fullmatch(name) for name in manifest["imported_of_ours"])
    assert len({one.manifest["weights_sha256"] for one in committed_sets()}) == 1


def sha256(file: Path) -> str:
    """Digest of a file as the manifest has it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.golden
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_comparison_notices_every_kind_of_difference(precision: str) -> None:
    """One id, one bit, one lost vector, one logit off by more than the bound, one prompt less."""
    expected = committed_sets()[0].by_precision[precision]
    assert not differences(expected, expected)
    assert not far_apart(expected, expected)

    def changed(what: str, value: Any) -> list[dict[str, Any]]:
        doctored = copy.deepcopy(expected)
        doctored[1][what][7] = value
        return doctored

    name = expected[1]["name"]
    other_id = changed("ids", -1)
    assert differences(expected, other_id) == far_apart(expected, other_id) == [f"{name}: ids at 7"]
    other_bit = changed("digests", "0" * 64)
    assert differences(expected, other_bit) == [f"{name}: digests at 7"]
    assert not far_apart(expected, other_bit)
    for shift in (2 * TOLERANCE, float("nan")):
        values = floats(expected[1]["samples"][7])
        values[-1] += shift
        moved = changed("samples", base64.b64encode(values.tobytes()).decode())
        assert far_apart(expected, moved) == [f"{name}: logits at 7"]
    lost = copy.deepcopy(expected)
    lost[0]["digests"].pop()
    assert len(differences(expected, lost)) == 1
    assert differences(expected, expected[1:])
    assert far_apart(expected, expected[1:])
