"""One client of a running server, for measurements: asks with token ids, may leave in the middle.

Used by the scripts beside it. Every answer is greedy and streamed.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Answer:
    """Seconds to the first event with text, and the usage that the last one told."""

    first: float
    usage: dict[str, Any]

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were cached, as the server reports it."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def ordinary_ids(length: int, seed: int, below: int = 40_000) -> tuple[int, ...]:
    """Ids of ordinary tokens."""
    draw = random.Random(seed)
    return tuple(draw.randrange(min(1000, below // 2), below) for _ in range(length))


def body(prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
    """A streamed greedy completion."""
    usage = {"include_usage": True}
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": usage}  # fmt: skip


def ask(url: str, prompt: tuple[int, ...], tokens: int = 1) -> Answer:
    """Wait for an answer's end."""
    began, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    asked = body(prompt, tokens)
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=None) as reply:
        if reply.status_code != 200:
            raise RuntimeError(reply.read().decode())
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            first = first or time.perf_counter() - began
            usage = chunk.get("usage") or usage
    return Answer(first, usage)


def leave(url: str, prompt: tuple[int, ...], when: Callable[[], bool], tokens: int = 1) -> None:
    """Ask, and close the connection as soon as ``when`` says so. Raises if the answer has ended."""
    payload = json.dumps(body(prompt, tokens)).encode()
    host, port = url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + payload)
        connection.setblocking(False)
        said = b""
        while not when():
            time.sleep(POLL_SECONDS)
            with suppress(BlockingIOError):
                said = said[-100:] + connection.recv(1 << 16)
            if b"data: [DONE]" in said:
                raise RuntimeError("the answer ended before its client left")


def scheduler(url: str) -> dict[str, Any]:
    """``/stats.scheduler``."""
    told: dict[str, Any] = httpx.get(f"{url}/stats", timeout=60).json()["scheduler"]
    return told
