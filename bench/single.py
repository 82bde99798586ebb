"""Served decode of one stream against ``mlx_lm``'s own loop in process, same weights and BLAS.

    .venv/bin/python bench/single.py [--tokens 128] [--repeat 5]

One server (float32 on CPU) and one in-process loop in a process of its own take turns; the rate
counts tokens after the first one, so that prefill is in neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from serve import RESULTS, bodies, starter
from servers import deltas, running, troupe
from weights import expanded

LOOP = """
import sys, json, time
from mlx_troupe.runtime.engine.blas import ensure_fast_blas
ensure_fast_blas()
import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
model, tokenizer = load(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line)
    prompt = mx.array(tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True))
    count = 0
    for token, _ in generate_step(prompt, model, max_tokens=asked["max_tokens"]):
        count += 1
        if count == 1:
            began = time.monotonic()
    print((count - 1) / (time.monotonic() - began), flush=True)
"""


def served(client: httpx.Client, body: dict[str, object]) -> float:
    """Tokens per second of one stream, after its first text."""
    began = last = 0.0
    tokens = 0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            text, counted = deltas(line)
            if text:
                began = began or time.monotonic()
                last = time.monotonic()
            tokens = counted or tokens
    return (tokens - 1) / (last - began)


def main() -> None:
    """Measure both sides in turns and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    model = starter()
    loop = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(expanded(model))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert loop.stdin is not None
    assert loop.stdout is not None
    ours: list[float] = []
    theirs: list[float] = []
    with (
        running(troupe(model), RESULTS / "single.log") as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):
        for turn in range(options.repeat + 1):
            body = bodies("", 1, options.tokens, f"single{turn}")[0]
            ours.append(served(client, body))
            loop.stdin.write(json.dumps(body) + "\n")
            loop.stdin.flush()
            theirs.append(float(loop.stdout.readline()))
    loop.stdin.close()
    loop.wait()
    mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
    ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]
    print(f"served {mine:.2f} tok/s, mlx_lm loop {other:.2f} tok/s, ratio {mine / other:.3f}")
    print(
        f"median of paired ratios {statistics.median(ratios):.3f}: {[f'{r:.3f}' for r in ratios]}"
    )


if __name__ == "__main__":
    main()
