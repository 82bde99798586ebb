"""Two thousand requests of random shape with mixed cancels: what is left of them.

    .venv/bin/python bench/soak.py [--requests 2000] [--clients 24] [--family llama]

Runs the whole company in this process on a tiny random model with mlx-lm's architecture of that
name. Prints rows, leases, tasks, MLX's active memory and its live arrays before and after; ends
with status 1 when they differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import rig

rig.ready()

from soak_rig import rest, soak  # noqa: E402
from tiny import make_checkpoint  # noqa: E402

from mlx_troupe.actors.figures import resident_bytes  # noqa: E402
from mlx_troupe.actors.system import open_runtime  # noqa: E402
from mlx_troupe.runtime.settings import Settings  # noqa: E402
from mlx_troupe.runtime.text.testing import ByteTokenizer  # noqa: E402


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """Warm up, soak, compare. True when all is as before."""
    model = make_checkpoint(folder / "model", options.family)
    settings = Settings(model, "tiny", dtype="keep", batch=8, queue=12, prompt_cache_bytes=1 << 20)
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await runtime.wait_ready()
        await soak(runtime, 200, seed=1, clients=options.clients)
        before, resident = await rest(runtime), resident_bytes()
        began = time.perf_counter()
        ends = await soak(runtime, options.requests, seed=2, clients=options.clients, told=True)
        seconds = time.perf_counter() - began
        after = await rest(runtime)
        print(f"{options.requests} requests in {seconds:.0f} s: {dict(ends)}")
        print(f"before {before}\nafter  {after}")
        print(f"resident {resident / 1e6:.0f} and {resident_bytes() / 1e6:.0f} MB")
        return before == after


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--family", default="llama")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        same = trio.run(run, options, Path(folder))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
