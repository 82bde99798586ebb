"""The composition matrix: what the composition test combines, and what does not go together.

The axes and their values, the pairs that are refused and in which words, and a generator of cases
that has every pair of values in it. ``python tests/matrix.py`` writes README's table from them.
Runs no model; ``composition_values`` says what the names stand for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- composition matrix -->\n", "<!-- end of the composition matrix -->\n"

Case = dict[str, str]
Allowed = Callable[[Case], bool]

AXES: dict[str, tuple[str, ...]] = {
    "kv": ("plain", "affine 4", "affine 8", "by layer", "turbo k8v3", "paged", "delayed"),
    "family": (
        "plain",
        "sliding",
        "softcap",
        "hybrid",
        "experts",
        "shared KV",
        "row by row",
    ),
    "sampling": ("greedy", "filters", "penalties", "hlg", "curve"),
    "seed": ("given", "shared", "none"),
    "logprobs": ("off", "chosen", "top 5"),
    "grammar": ("none", "json_schema", "regex", "choice"),
    "adapters": ("none", "one", "two"),
    "company": ("alone", "joins", "others end", "others cancelled"),
    "prefix": ("cold", "live row", "kept prompt", "second turn"),
}
"""Every value of an axis is combined with every value of every other axis."""

EXPLAINED: dict[str, str] = {
    "kv": "`--kv-quant` off, 4, 8, config, turbo; `--paged-kv`; `AffineKV(8, start=30)`",
    "family": "llama; with a window; gemma2; qwen3_5; qwen3_moe; gemma4_text; stablelm",
    "sampling": "best token; top-p, min-p, XTC, top-k; three penalties and a bias; `hlg`; `curve`",
    "seed": "its own; that of its neighbours; none",
    "logprobs": "`logprobs`, `top_logprobs`",
    "grammar": "`response_format`, `guided_regex`, `guided_choice`",
    "adapters": "LoRA, where neighbours have others",
    "company": "joins a batch; neighbours end, or are cancelled, while it runs",
    "prefix": "computed; taken from a row that runs, from a kept prompt, from the turn before",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two values that do not go together, as (axis, value).

    ``told`` are words that the operator is told, each side's name among them; ``note`` is for
    README.
    """

    first: tuple[str, str]
    second: tuple[str, str]
    told: tuple[str, str]
    note: str

    def __str__(self) -> str:
        return f"{self.first[1]} and {self.second[1]}"


_ENCODED = {
    "affine 4": "--kv-quant 4",
    "affine 8": "--kv-quant 8",
    "by layer": "--kv-quant config",
    "turbo k8v3": "--kv-quant turbo:k8v3",
    "delayed": "--kv-quant 8",
}
_OWN_ATTENTION = (
    "Gemma 2 and StableLM compute attention in a way of their own, on plain keys and values: "
    "`--kv-quant` with them is refused at start, by both names."
)
_NO_STEPS = (
    "StableLM's rows run one by one, so that there are no shared steps to page: `--paged-kv` with "
    "it is refused at start, by both names."
)
_PAST_THE_CACHE = (
    "`--paged-kv` goes past the prompt cache: prompts are computed anew; the start and `/stats` "
    "say so. (Rows that run share their prompts all the same.)"
)
REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(("kv", kv), ("family", family), (flag, name), _OWN_ATTENTION)
        for kv, flag in _ENCODED.items()
        for family, name in (("softcap", "gemma2"), ("row by row", "stablelm"))
    ),
    Refusal(("kv", "paged"), ("family", "row by row"), ("--paged-kv", "stablelm"), _NO_STEPS),
)
"""What is refused before anything is served."""
BYPASSED: tuple[Refusal, ...] = tuple(
    Refusal(("kv", "paged"), ("prefix", prefix), ("--paged-kv", "prompt cache"), _PAST_THE_CACHE)
    for prefix in ("kept prompt", "second turn")
)
"""What is served all the same, without the second value, and says so."""

MEANINGLESS: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = (
    (("company", "alone"), ("prefix", "live row")),
)
"""What cannot be asked for: nobody runs whose state could be taken."""


def refusal_of(kv: str, family: str) -> Refusal | None:
    """Why a model with this scheme does not start; None if it does."""
    pair = (("kv", kv), ("family", family))
    return next((r for r in REFUSALS if (r.first, r.second) == pair), None)


def is_allowed(case: Mapping[str, str]) -> bool:
    """Whether a case, which may be a part of one, can be run."""
    pairs = ((r.first, r.second) for r in REFUSALS)
    return not any(
        case.get(a) == x and case.get(b) == y for (a, x), (b, y) in (*pairs, *MEANINGLESS)
    )


def make_cases(seed: int = 7) -> dict[tuple[str, str], list[Case]]:
    """The cases of each model: every model meets every value, every pair of values is there."""
    models = [
        f"{kv}/{family}"
        for kv in AXES["kv"]
        for family in AXES["family"]
        if refusal_of(kv, family) is None
    ]
    axes = {"model": models, **{a: v for a, v in AXES.items() if a not in ("kv", "family")}}
    found: dict[tuple[str, str], list[Case]] = {}
    for case in pairwise(axes, is_allowed, seed):
        kv, family = case.pop("model").split("/")
        found.setdefault((kv, family), []).append({"kv": kv, "family": family, **case})
    return found


def pairwise(
    axes: Mapping[str, Sequence[str]], allowed: Allowed, seed: int, tries: int = 4
) -> Iterator[Case]:
    """Cases with a value for each axis, until every allowed pair of values was in one of them.

    Greedy: of some cases that begin with a pair still missing, the one with most missing pairs.
    """
    rng = random.Random(seed)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
        if allowed({a: x, b: y})
    }
    ordered = sorted(map(sorted, missing))
    while missing:
        ordered = [pair for pair in ordered if frozenset(pair) in missing]
        firsts = [dict(rng.choice(ordered)) for _ in range(tries)]
        begun = [_fill(first, axes, allowed, missing, rng) for first in firsts]
        best = max((case for case in begun if case is not None), key=lambda c: _gain(c, missing))
        missing -= _pairs(best)
        yield best


def _fill(
    case: Case,
    axes: Mapping[str, Sequence[str]],
    allowed: Allowed,
    missing: set[frozenset[tuple[str, str]]],
    rng: random.Random,
) -> Case | None:
    for axis in rng.sample([a for a in axes if a not in case], len(axes) - len(case)):
        values = rng.sample(list(axes[axis]), len(axes[axis]))
        possible = [{**case, axis: value} for value in values if allowed({**case, axis: value})]
        if not possible:
            return None
        case = max(possible, key=lambda c: _gain(c, missing))
    return {axis: case[axis] for axis in axes}


def _gain(case: Case, missing: set[frozenset[tuple[str, str]]]) -> int:
    return len(_pairs(case) & missing)


def _pairs(case: Case) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def table() -> str:
    """The matrix in Markdown: features by features, what does not go together, what was tried."""
    notes = _notes()
    names = list(AXES)
    lines = [f"| | {' | '.join(names[:-1])} |", f"|---|{':-:|' * (len(names) - 1)}"]
    for row, name in enumerate(names[1:], 1):
        marks = (_mark(frozenset((name, other)), list(notes.values())) for other in names[:row])
        empty = [""] * (len(names) - 1 - row)
        lines.append(f"| **{name}** | {' | '.join([*marks, *empty])} |")
    lines += ["", *(f"{number}. {text}" for number, text in enumerate(notes, 1)), ""]
    lines += ["| feature | its values | in words |", "|---|---|---|"]
    lines += [f"| {a} | {', '.join(values)} | {EXPLAINED[a]} |" for a, values in AXES.items()]
    return "\n".join(lines) + "\n"


def readme_with_table(text: str) -> str:
    """README with its table written anew."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError("README has no place for the table")
    return f"{head}{begin}\n{table()}\n{end}{tail}"


def _notes() -> dict[str, frozenset[str]]:
    """What is to be said, and of which two axes."""
    told = {r.note: frozenset((r.first[0], r.second[0])) for r in (*REFUSALS, *BYPASSED)}
    for (a, x), (b, y) in MEANINGLESS:
        told[f"A row that is {x} has no {y} to start from."] = frozenset((a, b))
    return told


def _mark(axes: frozenset[str], notes: Sequence[frozenset[str]]) -> str:
    return "✓" + "".join(f"<sup>{n}</sup>" for n, noted in enumerate(notes, 1) if noted == axes)


if __name__ == "__main__":
    README.write_text(readme_with_table(README.read_text("utf-8")), "utf-8")
