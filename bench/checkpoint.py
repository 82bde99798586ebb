"""Bytes that a long checkpointed answer costs on the disk, against the keys and values it made.

    .venv/bin/python bench/checkpoint.py [--tokens 8192] [--every 64] [--layers 4]

Runs the whole company in this process on a tiny random model of mlx-lm's llama architecture, with
``--generation-checkpoint``, and has one answer written. Every byte that goes to the folder counts:
states, their headers, and the records of the answer's tokens. Prints one line; ends with status 1
where the ratio is over 1.2 or the whole answer is not on the disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import rig

rig.ready()

from resume_rig import whole  # noqa: E402
from tiny import make_checkpoint, prompt  # noqa: E402
from tiny_families import EOS  # noqa: E402

from mlx_troupe.actors.system import open_runtime  # noqa: E402
from mlx_troupe.runtime.requests import (  # noqa: E402
    GenerationRequest,
    SamplingRequest,
    TokenPrompt,
)
from mlx_troupe.runtime.settings import Settings  # noqa: E402
from mlx_troupe.runtime.spill.files import Files  # noqa: E402
from mlx_troupe.runtime.text.testing import ByteTokenizer  # noqa: E402

BAR = 1.2
HEADS, WIDTH = 4, 64
PROMPT = prompt(32)


class Counted:
    """Every byte that any store of this process writes."""

    def __init__(self) -> None:
        self.bytes = 0
        write = Files.write

        def counted(files: Files, fd: int, data: memoryview) -> int:
            written = write(files, fd, data)
            self.bytes += written
            return written

        Files.write = counted  # type: ignore[method-assign,assignment]


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """One answer. True when it is on the disk and cost no more than it may."""
    model = make_checkpoint(
        folder / "model",
        num_hidden_layers=options.layers,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=WIDTH,
        max_position_embeddings=options.tokens + 100,
    )
    settings = Settings(
        model,
        "tiny",
        prompt_cache_bytes=2 << 30,
        ssd_cache=folder / "cache",
        generation_checkpoint=options.every,
    )
    never = ((EOS, -100.0),)
    sampling = SamplingRequest(temperature=1.0, seed=1, logit_bias=never)
    request = GenerationRequest(TokenPrompt(PROMPT), sampling, max_tokens=options.tokens)
    counted = Counted()
    async with open_runtime(settings, tokenizer=ByteTokenizer()) as runtime:
        await runtime.wait_ready()
        began = time.perf_counter()
        usage = (await whole(runtime, request)).usage
        seconds = time.perf_counter() - began
        await runtime.flush_cache(60)
        told: dict[str, Any] = runtime.stats()
    disk = told["ssd_cache"]
    durable = disk["longest_durable_prefix_tokens"]
    made = usage.completion_tokens * options.layers * 2 * HEADS * WIDTH * 4
    ratio = counted.bytes / made
    print(
        f"{usage.completion_tokens} tokens, N = {options.every}: {counted.bytes:,} bytes for"
        f" {made:,} of keys and values: {ratio:.3f} x (bar {BAR}); {disk['spills']} states,"
        f" {durable} tokens durable; {usage.completion_tokens / seconds:.0f} tokens/s"
    )
    return bool(ratio <= BAR and durable == len(PROMPT) + usage.completion_tokens - 1)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not trio.run(run, options, Path(folder)))


if __name__ == "__main__":
    main()
