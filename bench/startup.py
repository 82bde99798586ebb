"""Seconds from a process's start to the first token of its first request, model on disk.

    .venv/bin/python bench/startup.py [--repeat 5]

Both servers are polled in the same way: the same streamed chat is posted until it is accepted,
every 20 ms, and the clock stops at the first visible text. Sides alternate; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from serve import RESULTS, bodies, starter
from servers import Arm, deltas, free_port, mlx_lm, stop, troupe
from weights import expanded, same_blas


def first_token(arm: Arm, model: Path) -> float:
    """Start the server; seconds until the first text of the first request."""
    port = free_port()
    command = [part.format(port=port) for part in arm.command]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **arm.env}
    # The name that each server accepts without looking anywhere else.
    name = str(model) if arm.name == "mlx_lm.server" else ""
    body = bodies(name, 1, 8, "start")[0]
    with (RESULTS / f"startup-{arm.name}.log").open("ab") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            while process.poll() is None:
                if (seconds := attempt(f"http://127.0.0.1:{port}", body, began)) is not None:
                    return seconds
                time.sleep(0.02)
            raise RuntimeError(f"{arm.name} ended with status {process.returncode}")
        finally:
            stop(process)


def attempt(url: str, body: dict[str, object], began: float) -> float | None:
    """Seconds at the first text, or None when the server does not take requests yet."""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
            if answer.status_code != 200:
                answer.read()
                return None
            for line in answer.iter_lines():
                if deltas(line)[0]:
                    return time.monotonic() - began
    except httpx.TransportError:
        return None
    raise RuntimeError("a stream without text")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    RESULTS.mkdir(exist_ok=True)
    model = starter()
    arms = (
        (troupe(model), model),
        (mlx_lm(model), model),
        (mlx_lm(expanded(model), env=same_blas()), expanded(model)),
    )
    seen: list[list[float]] = [[] for _ in arms]
    for _ in range(repeat + 1):
        for times, (arm, path) in zip(seen, arms, strict=True):
            times.append(first_token(arm, path))
    labels = ("mlx-troupe", "mlx_lm.server as shipped", "mlx_lm.server float32 + same BLAS")
    for label, times in zip(labels, seen, strict=True):
        # The first round fills the page cache and is not counted.
        shown = " ".join(f"{t:.2f}" for t in times[1:])
        print(f"{label}: median {statistics.median(times[1:]):.2f} s ({shown})")


if __name__ == "__main__":
    main()
