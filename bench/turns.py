"""The second turn of a chat with a long history: what is computed, and how soon the answer begins.

.venv/bin/python bench/turns.py [--history 1000] [--repeat 3]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from serve import RESULTS, starter
from servers import running, troupe


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, int]]:
    """Seconds to the first text, the whole text, and prompt/cached/completion tokens."""
    import json

    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    began, first, text, usage = time.monotonic(), 0.0, "", {}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                used = chunk["usage"]
                usage = {
                    "prompt": used["prompt_tokens"],
                    "cached": used["prompt_tokens_details"]["cached_tokens"],
                    "completion": used["completion_tokens"],
                }
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.monotonic() - began
                    text += piece
    return first, text, usage


def main() -> None:
    """Cold first turn, then the second turn on its history; a fresh salt each time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--history", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    colds, warms = [], []
    with (
        running(troupe(starter()), RESULTS / "turns.log") as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        ask(client, [{"role": "user", "content": "Hello"}])
        for turn in range(options.repeat):
            words = " ".join(f"item{turn}x{i}" for i in range(options.history // 6))
            first = [{"role": "user", "content": f"Remember this list: {words}. What is it?"}]
            cold, answer, used = ask(client, first)
            second = [
                *first,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "Thank you. Name one."},
            ]
            warm, _, again = ask(client, second)
            colds.append(cold)
            warms.append(warm)
            print(f"turn 1 {used} first text {cold:.2f} s; turn 2 {again} first text {warm:.2f} s")
    ratio = statistics.median(colds) / statistics.median(warms)
    print(f"first text {ratio:.1f} × sooner on the second turn")


if __name__ == "__main__":
    main()
