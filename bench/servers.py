"""Servers under measurement: how each is started, asked and stopped.

Used by the scripts beside it. Every server gets the same model directory, the same machine and a
fresh process; nothing here knows what is measured.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: its name, its command line and its environment."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def troupe(model: Path, *flags: str) -> Arm:
    """This project, with default flags."""
    program = str(Path(sys.executable).parent / "mlx-troupe")
    return Arm("mlx-troupe", (program, "serve", str(model), "--port", "{port}", *flags))


def mlx_lm(model: Path, *, env: dict[str, str] | None = None) -> Arm:
    """mlx_lm.server of this interpreter, with default flags; ``env`` may put a BLAS before it."""
    command = (sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", "{port}")
    return Arm("mlx_lm.server", command, env or {})


def vllm_mlx(home: Path, model: Path, *, env: dict[str, str] | None = None) -> Arm:
    """vllm-mlx out of the environment ``home``, with continuous batching."""
    command = (str(home / "bin" / "vllm-mlx"), "serve", str(model), "--port", "{port}",
               "--continuous-batching")  # fmt: skip
    return Arm("vllm-mlx", command, env or {})


def rapid_mlx(home: Path, model: Path, *, env: dict[str, str] | None = None) -> Arm:
    """Rapid-MLX out of the environment ``home``, with default flags."""
    command = (str(home / "bin" / "rapid-mlx"), "serve", str(model), "--port", "{port}")
    return Arm("rapid-mlx", command, env or {})


@contextmanager
def running(arm: Arm, log: Path) -> Iterator[str]:
    """Start the arm's server; yields its base URL once it answers, and stops it at the end."""
    port = free_port()
    command = [part.format(port=port) for part in arm.command]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **arm.env}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_answering(url, process)
        yield url
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(15)


def wait_until_answering(url: str, process: subprocess.Popen[bytes], limit: float = 240) -> None:
    """Poll until the server says that it is well. Raises RuntimeError when its process ended."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise RuntimeError("the server did not answer in time")


def served_name(url: str, model: Path) -> str:
    """The name that a server wants in a request: what it lists, or the model's directory."""
    try:
        listed = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
    except (httpx.HTTPError, ValueError):
        return str(model)
    ids = [str(row["id"]) for row in listed]
    return str(model) if str(model) in ids or not ids else ids[0]


def deltas(line: str) -> tuple[str, int | None]:
    """Visible text of one SSE line, and the completion tokens if it carries usage."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return "", None
    chunk = json.loads(line[6:])
    if "error" in chunk:
        raise RuntimeError(str(chunk["error"]))
    text = "".join(
        (choice.get("delta") or {}).get("content") or choice.get("text") or ""
        for choice in chunk.get("choices", ())
    )
    usage = chunk.get("usage")
    return text, int(usage["completion_tokens"]) if usage else None
