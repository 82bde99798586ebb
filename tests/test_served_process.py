"""A server as a process of its own: asked to stop, or killed, in the midst of an answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import EOS, make_checkpoint, prompt

pytestmark = pytest.mark.mlx

SCRIPT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import trio
from company import WordTokenizer

from mlx_troupe.http.cli.serve import run_server
from mlx_troupe.runtime.engine import tokenizer
from mlx_troupe.runtime.settings import Settings

tokenizer.load_tokenizer = lambda *_, **__: WordTokenizer()
settings = Settings(
    Path(sys.argv[2]), "tiny", ssd_cache=Path(sys.argv[3]), generation_checkpoint=int(sys.argv[4])
)
flags = {"allowed_hosts": (), "cors_origins": (), "keepalive": 15.0, "adapter_dirs": (Path("/"),)}
trio.run(run_server, settings, "127.0.0.1", 0, {**flags, "ignore_sessions": False})
"""
PROMPT = list(prompt(200, 3))
ASK: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 500,
    "logit_bias": {"0": -100, str(EOS): -100},
}
LONG = 1500
"""Tokens that take longer than the first of them take to be written."""
PATIENCE = 60.0


class Server:
    """A process that serves, and a client for it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        told = ""
        while "Ctrl-C stops" not in told:
            line = process.stdout.readline()
            assert line, f"it ended: {told}"
            told += line
        url = next(line.split()[1] for line in told.splitlines() if line.startswith("address"))
        self.client = httpx.Client(base_url=url.removesuffix("/v1"), timeout=PATIENCE)

    def answer(self, **changes: Any) -> tuple[str, int]:
        """A whole answer, and how much of its prompt was cached."""
        reply = self.client.post("/v1/completions", json=ASK | changes).json()
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stats(self, block: str) -> dict[str, Any]:
        """One block of ``/stats``."""
        found: dict[str, Any] = self.client.get("/stats").json()[block]
        return found

    @contextmanager
    def streaming(self, **changes: Any) -> Iterator[Iterator[str]]:
        """The lines of a streamed answer that has begun."""
        body = ASK | {"stream": True} | changes
        with self.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            yield chain((next(lines),), lines)


@contextmanager
def served(folder: Path, checkpoint: int = 0) -> Iterator[Server]:
    """A server on the model and the cache of a folder."""
    arguments = (str(Path(__file__).parent), str(folder / "model"), str(folder / "cache"))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments, str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            server = Server(process)
            with server.client:
                yield server
        finally:
            process.kill()


def text_of(lines: list[str]) -> str:
    """The text of streamed chunks."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_stop_loses_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The answer comes to its end, and the next process has all that was computed for it."""
    make_checkpoint(tmp_path / "model")
    with served(tmp_path) as server:
        with server.streaming() as lines:
            server.process.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        _, told = server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 0, told
        assert "Stopping once running answers have ended" in told
        assert "were not written" not in told
    said = [int(word) for word in text_of(rest).split()]
    with served(tmp_path) as server:
        _, cached = server.answer(prompt=[*PROMPT, *said], max_tokens=1)
        assert cached == len(PROMPT) + len(said) - 1


def test_a_server_that_is_killed_goes_on_with_its_answer(tmp_path: Path) -> None:
    """With checkpoints the next process says what the last one had said, and the rest."""
    make_checkpoint(tmp_path / "model")
    with served(tmp_path, 16) as server:
        with server.streaming(max_tokens=LONG):
            ended = time.monotonic() + PATIENCE
            while not server.stats("checkpoints")["written"]:
                assert time.monotonic() < ended
            server.process.kill()
            server.process.wait()
    with served(tmp_path, 16) as server:
        text, cached = server.answer(max_tokens=LONG)
        assert server.stats("checkpoints")["found"] == 1
        made = server.stats("scheduler")["generated_tokens"]
        assert len(text.split()) == LONG
        assert cached <= len(PROMPT)
        again, _ = server.answer(max_tokens=LONG)
        assert again == text
        assert server.stats("checkpoints")["found"] == 1, "it was given to its end"
        assert server.stats("scheduler")["generated_tokens"] - made == LONG > made
