"""Served decode of one stream against ``mlx_lm``'s own loop in process, same weights and BLAS.

    .venv/bin/python bench/single.py [--tokens 128] [--repeat 5]

One server (float32 on CPU) and one in-process loop in a process of its own take turns; the rate
counts tokens after the first one, so that prefill is in neither.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from serve import RESULTS, bodies, starter
from servers import running, troupe
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


def served(url: str, body: dict[str, object]) -> float:
    """Tokens per second of one stream, after its first text.

    Read from a bare socket and parsed afterwards: on two cores a client that parses while it reads
    would take part of what is measured.
    """
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    pieces: list[tuple[float, bytes]] = []
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + payload)
        while piece := connection.recv(1 << 16):
            pieces.append((time.monotonic(), piece))
    with_text = [at for at, piece in pieces if b'"content":"' in piece and b'""' not in piece]
    tokens = re.search(rb'"completion_tokens":(\d+)', b"".join(piece for _, piece in pieces))
    assert tokens is not None
    return (int(tokens[1]) - 1) / (with_text[-1] - with_text[0])


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
    with running(troupe(model), RESULTS / "single.log") as url:
        for turn in range(options.repeat + 1):
            body = bodies("", 1, options.tokens, f"single{turn}")[0]
            ours.append(served(url, body))
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
