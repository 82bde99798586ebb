"""Kills a server in the middle of an answer, starts it again and asks again: is it the same text?

    python bench/kill.py [--model DIR] [--kills 20] [--tokens 200] [--every 16] [--seeded]

For each kind of sampling one uninterrupted answer is the measure. Then, again and again: a fresh
folder, a server, the same streamed request, ``kill -9`` at a random moment of the stream, another
server on the same folder, the identical request. Counted are answers whose text differs, and the
tokens computed twice: those that the second server generated although the client had them from the
first. Prints a Markdown table and leaves it under bench/results/, which git ignores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from servers import free_port, stop, troupe, wait_until_answering

RESULTS = Path(__file__).parent / "results"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded, temperature 1": {"temperature": 1, "seed": 20},
}


@dataclass(frozen=True)
class Server:
    """A running server and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """``kill -9``."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def generated(self) -> tuple[int, int]:
        """Tokens that it has generated, and prompt tokens that it has prefilled."""
        told = httpx.get(f"{self.url}/stats", timeout=10).json()["scheduler"]
        return told["generated_tokens"], told["prefilled_tokens"]


@contextmanager
def serving(model: Path, folder: Path, every: int) -> Iterator[Server]:
    """A server that writes its answers down in a folder."""
    port = free_port()
    flags = ("--ssd-cache", str(folder), "--generation-checkpoint", str(every))
    command = [part.format(port=port) for part in troupe(model, *flags).command]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (RESULTS / "kill.log").open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_until_answering(server.url, process)
        yield server
    finally:
        stop(process)


@dataclass(frozen=True)
class Answer:
    """What a client read: text, when each piece came, and the usage at the end."""

    text: str
    times: tuple[float, ...]
    usage: dict[str, Any]


def ask(server: Server, body: dict[str, Any], kill_after: float | None = None) -> Answer:
    """Read a stream; at a moment after its first text the server is killed."""
    text, usage, times = "", {}, []
    first: float | None = None
    with (
        suppress(httpx.HTTPError),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["text"]
            now = time.monotonic()
            first = first or now
            times.append(now - first)
            if kill_after is not None and now - first >= kill_after:
                server.kill()
                kill_after = None
    return Answer(text, tuple(times), usage)


@dataclass(frozen=True)
class Kill:
    """What came of one kill."""

    same: bool
    prefix: bool
    seen: int
    twice: int
    cached: int


def one_kill(model: Path, every: int, body: dict[str, Any], whole: Answer, moment: float) -> Kill:
    """Kill, start again, ask again."""
    total = whole.usage["completion_tokens"]
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    try:
        with serving(model, folder, every) as server:
            cut = ask(server, body, moment)
        # Every piece is a token or more; the last one read is a lower bound of what was made.
        seen = min(total, len(cut.times))
        with serving(model, folder, every) as server:
            before = server.generated()
            again = ask(server, body)
            made, prefilled = (b - a for a, b in zip(before, server.generated(), strict=True))
        usage = again.usage
        prompt_again = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        twice = max(0, made - (total - seen)) + max(0, prefilled - prompt_again)
        return Kill(
            again.text == whole.text and usage["completion_tokens"] == total,
            whole.text.startswith(cut.text),
            seen,
            twice,
            usage["prompt_tokens_details"]["cached_tokens"],
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(options: argparse.Namespace, name: str, draw: random.Random) -> list[Kill]:
    """All kills with one kind of sampling."""
    body = {
        "prompt": options.prompt,
        "max_tokens": options.tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **SAMPLINGS[name],
    }
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    with serving(options.model, folder, options.every) as server:
        whole = ask(server, body)
    shutil.rmtree(folder, ignore_errors=True)
    kills: list[Kill] = []
    for n in range(options.kills):
        moment = draw.uniform(0, whole.times[-1])
        kills.append(one_kill(options.model, options.every, body, whole, moment))
        print(f"{name} {n}: {kills[-1]}", flush=True)
    return kills


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model directory (default: the starter)")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--prompt", default="The history of bridges began when people first")
    options = parser.parse_args()
    if options.model is None:
        from mlx_troupe.runtime.store.starter import ensure_starter

        options.model = ensure_starter()
    RESULTS.mkdir(exist_ok=True)
    draw = random.Random(options.seed)
    lines = [
        "| sampling | kills | same text | tokens computed twice: median, most | bound 2 N |",
        "|---|---|---|---|---|",
    ]
    for name in SAMPLINGS:
        kills = measure(options, name, draw)
        twice = [kill.twice for kill in kills]
        same = sum(kill.same and kill.prefix for kill in kills)
        lines.append(
            f"| {name} | {len(kills)} | {same} | {statistics.median(twice):g}, {max(twice)} "
            f"| {2 * options.every} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    now = datetime.datetime.now(datetime.UTC)
    (RESULTS / f"kill-{now:%Y%m%dT%H%M}.md").write_text(text)


if __name__ == "__main__":
    main()
