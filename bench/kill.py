"""Kills a server in the middle of an answer, starts it again and asks again: is it the same text?

    python bench/kill.py [--model DIR] [--sampling greedy] [--kills 20] [--tokens 64] [--every 8]

Every kill has a prompt of its own. A server streams its answer; at a random moment strictly inside
it (behind so many tokens that its client has read, and a random part of the next one's time) comes
``kill -9``; another server starts on the same folder and is sent the identical request. That server
is also the one that the next kill meets. Answers are compared with those of a server that was never
interrupted, which gives many at once; where a text differs from that one, the uninterrupted run is
made anew, alone, and counts.

*Twice* are tokens of the answer that the first server had made, as far as its client knows, and
that the second generated or prefilled again; tokens of the prompt are told beside. *Behind* is how
many tokens the client read between the one that made a state due and the moment when that state
stood in the folder under its name: what is made while a state is written. The bounds are N + behind
and 2 N. Prints a Markdown table and leaves it under bench/results/, which git ignores.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from servers import free_port, stop, troupe, wait_until_answering
from weights import expanded

RESULTS = Path(__file__).parent / "results"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 20},
}
SUBJECTS = ("bridges", "clocks", "salt", "maps", "glass", "bread", "paper", "lenses")
PROMPT = "Notes, chapter {n}. The long history of {subject} began in the year when people first"
LOOK_EVERY = 0.004


@dataclass(frozen=True)
class Server:
    """A running server and its process."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """``kill -9``."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stats(self) -> dict[str, Any]:
        """What it tells of itself."""
        told: dict[str, Any] = httpx.get(f"{self.url}/stats", timeout=30).json()
        return told

    def computed(self) -> tuple[int, int]:
        """Tokens that it has generated, and tokens that it has prefilled."""
        told = self.stats()["scheduler"]
        return told["generated_tokens"], told["prefilled_tokens"]

    def rest(self) -> None:
        """Wait until all that it keeps is on the disk."""
        while True:
            told = self.stats()
            if not told["ssd_cache"]["pending_spills"] + told["checkpoints"]["pending"]:
                return
            time.sleep(0.02)


def start(model: Path, *flags: str) -> Server:
    """A server that answers."""
    port = free_port()
    command = [part.format(port=port) for part in troupe(model, *flags).command]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (RESULTS / "kill.log").open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_until_answering(server.url, process)
    except BaseException:
        stop(process)
        raise
    return server


@dataclass(frozen=True)
class Whole:
    """An uninterrupted answer, and where each of its tokens begins in the text."""

    text: str
    offsets: tuple[int, ...]
    tokens: int

    def seen(self, text: str) -> int:
        """Tokens that whoever has read so much of the text has been sent, at least."""
        return sum(offset < len(text) for offset in self.offsets)


def ask_whole(server: Server, body: dict[str, Any]) -> Whole:
    """One answer, never interrupted."""
    reply = httpx.post(f"{server.url}/v1/completions", json={**body, "logprobs": 0}, timeout=300)
    reply.raise_for_status()
    told = reply.json()
    choice = told["choices"][0]
    offsets = tuple(choice["logprobs"]["text_offset"])
    return Whole(choice["text"], offsets, told["usage"]["completion_tokens"])


@dataclass
class Read:
    """What a client has read of a stream: how much text at which times, and the usage."""

    text: str = ""
    lengths: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


def stream(server: Server, body: dict[str, Any], whole: Whole, moment: float | None) -> Read:
    """Read a stream; with a moment, in tokens, until the server is killed then."""
    read, times = Read(), []
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with (
        suppress(httpx.HTTPError),
        httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=300) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            read.usage = chunk.get("usage") or read.usage
            for choice in chunk["choices"]:
                read.text += choice["text"]
                read.ended = read.ended or choice["finish_reason"] is not None
            times.append(time.monotonic())
            read.lengths.append((times[-1], len(read.text)))
            if moment is not None and whole.seen(read.text) >= int(moment):
                gap = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.05
                time.sleep(moment % 1 * gap)
                server.kill()
                moment = None
    return read


class Watch:
    """Notes when states appear in a folder, on a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = set(os.listdir(folder))
        self._found: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.is_set():
            now = time.monotonic()
            for name in set(os.listdir(self._folder)) - self._known:
                if name.endswith(".safetensors"):
                    self._found.setdefault(name, now)
            self._over.wait(LOOK_EVERY)

    def end(self) -> list[tuple[float, int]]:
        """When each new state was there, and of how many tokens it is."""
        self._over.set()
        self._thread.join()
        return [(at, length_of(self._folder / name)) for name, at in self._found.items()]


def length_of(path: Path) -> int:
    """Tokens of a state's file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return int(json.loads(file.read(size))["__metadata__"]["length"])


@dataclass(frozen=True)
class Kill:
    """What came of one kill; all figures in tokens."""

    same: bool
    seen: int
    generated: int
    prefilled: int
    prompt: int
    behind: tuple[int, ...]

    @property
    def twice(self) -> int:
        """Tokens of the answer that were computed twice."""
        return self.generated + self.prefilled


def behind(read: Read, whole: Whole, found: list[tuple[float, int]], prompt: int) -> list[int]:
    """For each state of an answer: tokens read since it was due, when it was there."""
    late = []
    for at, length in found:
        due = length - prompt + 1  # the last token is in no state
        text = next((n for when, n in reversed(read.lengths) if when <= at), 0)
        late.append(max(0, whole.seen(read.text[:text]) - due))
    return late


class Bench:
    """A folder, and the server that is now on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kill-"))
        every = ("--generation-checkpoint", str(options.every))
        self._flags = ("--ssd-cache", str(self._folder), *every)
        self._model = options.served
        self._server = start(self._model, *self._flags)

    def close(self) -> None:
        """End the server and remove the folder."""
        stop(self._server.process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, body: dict[str, Any], whole: Whole, moment: float) -> Kill:
        """Kill, start again, ask again."""
        self._server.rest()
        watch = Watch(self._folder)
        try:
            cut = stream(self._server, body, whole, moment)
        finally:
            found = watch.end()
        if cut.ended:
            raise RuntimeError("the answer ended before the server was killed")
        self._server = server = start(self._model, *self._flags)
        before = server.computed()
        again = stream(server, body, whole, None)
        made, prefilled = (b - a for a, b in zip(before, server.computed(), strict=True))
        seen, usage = whole.seen(cut.text), again.usage
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        same = again.text == whole.text and whole.text.startswith(cut.text)
        if not same:
            alone = ask_whole(server, body)
            print(f"alone: {again.text!r}\n{alone.text!r}\n{whole.text!r}")
            same = again.text == alone.text and alone.text.startswith(cut.text)
        return Kill(
            same,
            seen,
            max(0, made - (whole.tokens - seen)),
            max(0, prefilled - (prompt - cached)),
            max(0, prompt - 1 - cached),
            tuple(behind(cut, whole, found, prompt)),
        )


def bodies(options: argparse.Namespace, sampling: str) -> list[dict[str, Any]]:
    """One request a kill."""
    return [
        {
            "prompt": PROMPT.format(n=n + 1, subject=SUBJECTS[n % len(SUBJECTS)]),
            "max_tokens": options.tokens,
            **SAMPLINGS[sampling],
        }
        for n in range(options.kills)
    ]


def references(options: argparse.Namespace, asked: list[dict[str, Any]]) -> list[Whole]:
    """All answers, uninterrupted."""
    server = start(options.served)
    try:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda body: ask_whole(server, body), asked))
    finally:
        stop(server.process)


def measure(options: argparse.Namespace, sampling: str) -> list[Kill]:
    """All kills with one kind of sampling."""
    draw = random.Random(f"{options.seed} {sampling}")
    asked = bodies(options, sampling)
    wholes = references(options, asked)
    bench = Bench(options)
    kills: list[Kill] = []
    try:
        for n, (body, whole) in enumerate(zip(asked, wholes, strict=True)):
            # The server is up to three tokens ahead of its client.
            moment = draw.uniform(1, max(2, whole.tokens - 4))
            kills.append(bench.kill(body, whole, moment))
            print(f"{sampling} {n}: at {moment:.2f} of {whole.tokens}: {kills[-1]}", flush=True)
    finally:
        bench.close()
    return kills


def row(sampling: str, every: int, kills: list[Kill]) -> str:
    """One line of the table."""
    twice = [kill.twice for kill in kills]
    late = [n for kill in kills for n in kill.behind] or [0]
    cells = (
        sampling,
        len(kills),
        sum(kill.same for kill in kills),
        f"{statistics.median(twice):g}, {max(twice)}",
        f"{statistics.median(late):g}, {max(late)}",
        f"{sum(n <= every + max(late) for n in twice)}, {sum(n <= 2 * every for n in twice)}",
        max(kill.prompt for kill in kills),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model directory (default: the starter)")
    parser.add_argument("--sampling", choices=(*SAMPLINGS, "both"), default="both")
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=8, help="N: tokens between checkpoints")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    options = parser.parse_args()
    if options.model is None:
        from mlx_troupe.runtime.store.starter import ensure_starter

        options.model = ensure_starter()
    # Expanded beforehand it is the same model, sooner loaded.
    options.served = expanded(options.model)
    RESULTS.mkdir(exist_ok=True)
    # Whoever stops this stops its server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    lines = [
        f"N = {options.every}. Median and most where two figures stand.",
        "",
        "| sampling | kills | same text | tokens computed twice | behind | within N + behind, 2 N"
        " | prompt tokens again, most |",
        "|---|---|---|---|---|---|---|",
    ]
    samplings = SAMPLINGS if options.sampling == "both" else (options.sampling,)
    lines += [row(name, options.every, measure(options, name)) for name in samplings]
    text = "\n".join(lines) + "\n"
    print(text)
    now = datetime.datetime.now(datetime.UTC)
    (RESULTS / f"kill-{now:%Y%m%dT%H%M}.md").write_text(text)


if __name__ == "__main__":
    main()
