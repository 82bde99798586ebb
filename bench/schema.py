"""Rows under a JSON Schema against free rows: step time, and whether what they write is valid.

    .venv/bin/python bench/schema.py                      the starter
    .venv/bin/python bench/schema.py --shape llama-3b     random weights, any device; needs no files

Both sides decode the same prompts on one device and take turns; prefill and compiling are outside
the clock. The timed schema never lets a row end, so that every row needs a mask in every step. Then
rows under schemas that end are decoded to their ends, and what ended by itself is validated. There
JSON is compact: a model that knows nothing of it would write mostly white space.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rig import Rig, ready

ready()

import jsonschema_rs  # noqa: E402
import mlx.core as mx  # noqa: E402
from engine import SHAPES, make_model  # noqa: E402
from serve import starter  # noqa: E402

from mlx_troupe.runtime.engine.tokenizer import load_tokenizer  # noqa: E402
from mlx_troupe.runtime.grammars import JsonGrammar  # noqa: E402
from mlx_troupe.runtime.text.matching import GrammarCompiler, TokenMatcher  # noqa: E402
from mlx_troupe.runtime.text.pieces import TokenTable  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["admin", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "tags", "active"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 10_000}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "lat": {"type": "number", "minimum": -90, "maximum": 90},
    },
    "required": ["city", "lat"],
}
SCHEMAS = (PERSON, PLACE, {"type": "array", "items": PLACE, "minItems": 1, "maxItems": 2})


ALPHABETS = ("etaoinshrdlu", "abcdefghijklmnopqrstuvwxyz", "0123456789", '",:{}[] \n.-')


def made_up_tokenizer(size: int) -> SimpleNamespace:
    """Bytes, then words, numbers and punctuation at random: as many tokens as the model has."""
    chosen = random.Random(0)
    pieces = {bytes([value]): None for value in range(256)}
    while len(pieces) < size - 1:
        alphabet = chosen.choice(ALPHABETS)
        word = "".join(chosen.choices(alphabet, k=chosen.randint(2, 9)))
        pieces[(chosen.choice(("", " ")) + word).encode()] = None
    # The end token is 0 in the random checkpoints.
    table = TokenTable((b"", *pieces))
    eos_ids = frozenset({0})
    return SimpleNamespace(table=table, eos_ids=eos_ids, is_special=eos_ids.__contains__)


def step_seconds(
    rig: Rig,
    prompts: Sequence[Sequence[int]],
    compiler: GrammarCompiler,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Median seconds of a step on either side, and their ratio."""
    grammar = JsonGrammar(json.dumps(ENDLESS))
    sides: dict[str, list[float]] = {"free": [], "schema": []}
    for turn in range(options.repeat + 1):
        for side, seen in sides.items():
            matchers = [compiler.compile(grammar) for _ in prompts] if side == "schema" else []
            seconds = len(prompts) / rig.rate(prompts, options.tokens, matchers)
            if turn:
                seen.append(seconds)
    medians = {side: statistics.median(seen) for side, seen in sides.items()}
    return medians | {"ratio": medians["schema"] / medians["free"]}


def written(
    rig: Rig, prompts: Sequence[Sequence[int]], matchers: Sequence[TokenMatcher], limit: int
) -> tuple[list[list[int]], list[bool]]:
    """The rows' tokens up to their ends, and which of them ended by themselves."""
    rows = rig.start(prompts, matchers)
    tokens: dict[int, list[int]] = {row: [] for row in rows}
    ended = dict.fromkeys(rows, False)
    for _ in range(limit):
        going = tuple(row for row in rows if not ended[row])
        if not going:
            break
        for sampled in rig.step(decode=going).sampled:
            tokens[sampled.row].append(sampled.token)
            ended[sampled.row] = sampled.ends or sampled.token in rig.info.eos_ids
    rig.end(rows)
    return list(tokens.values()), list(ended.values())


def validity(
    rig: Rig,
    prompts: Sequence[Sequence[int]],
    compiler: GrammarCompiler,
    table: TokenTable,
    limit: int,
) -> dict[str, int]:
    """Rows under several schemas, how many ended by themselves, and how many of these are valid."""
    wanted = [SCHEMAS[n % len(SCHEMAS)] for n in range(len(prompts))]
    grammars = [JsonGrammar(json.dumps(schema), any_whitespace=False) for schema in wanted]
    matchers = [compiler.compile(grammar) for grammar in grammars]
    tokens, ended = written(rig, prompts, matchers, limit)
    valid = 0
    for schema, ids, done in zip(wanted, tokens, ended, strict=True):
        if done:
            text = b"".join(table.pieces[i] for i in ids).decode()
            valid += jsonschema_rs.is_valid(schema, json.loads(text))
    return {"rows": len(prompts), "ended": sum(ended), "valid": valid}


def prompts_of(rows: int, length: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Different ids for every row."""
    return [
        tuple(1000 + (r * 7919 + i * 31) % (vocab_size - 1000) for i in range(length))
        for r in range(rows)
    ]


def main() -> None:
    """Measure, print a line for each part, then JSON. Exits with 1 if an answer is not valid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of the starter")
    parser.add_argument("--bits", type=int, default=0, help="0: bfloat16 (float32 on CPU)")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    # Fewer never leave the first of the schema's strings, which all rows enter together.
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--limit", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
            make_model(Path(folder), options.shape, options.bits, dtype)
            rig = Rig(Path(folder))
            tokenizer: Any = made_up_tokenizer(rig.info.vocab_size)
        else:
            rig = Rig(starter())
            tokenizer = load_tokenizer(starter())
        compiler = GrammarCompiler(tokenizer, rig.info.vocab_size, rig.info.eos_ids)
        prompts = prompts_of(options.rows, options.prompt, rig.info.vocab_size)
        times = step_seconds(rig, prompts, compiler, options)
        print(f"{options.rows} rows: free {times['free'] * 1e3:.2f} ms a step, under one schema "
              f"{times['schema'] * 1e3:.2f} ms, {times['ratio']:.3f} ×", flush=True)  # fmt: skip
        answers = validity(rig, prompts, compiler, tokenizer.table, options.limit)
        print("answers:", answers)
    print(json.dumps([times | answers]))
    if answers["valid"] < answers["ended"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
