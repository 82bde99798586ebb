"""Decode speed of the MLX device against mlx-lm's own loops, one process, one model.

    .venv/bin/python bench/engine.py --shape llama-3b --bits 0 --rows 1,8,32,64

Random weights of a real shape (no download). Each side is warmed at each size, the sides take
turns, medians of the repetitions; prefill is outside the clock. ``generate_step`` is the bar of a
lone row, ``BatchGenerator`` that of several; both run mlx-lm's own model.

    .venv/bin/python bench/engine.py --shape llama-3b --rows "" --adapters 3

32 rows, of which every fourth has none and the others one of three LoRA adapters of rank 16 on all
projections, against 32 rows without; and the same where all rows have the first one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rig import Rig, ready

ready()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.generate import BatchGenerator, generate_step  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.utils import load_model  # noqa: E402

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3b": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    },
    "smollm2": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "max_position_embeddings": 32768,
    },
}


def make_model(path: Path, shape: str, bits: int, dtype: mx.Dtype) -> None:
    """Write a checkpoint of random weights that mlx-lm loads."""
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        **SHAPES[shape],
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))


def make_adapter(path: Path, shape: str, seed: int, dtype: mx.Dtype, rank: int = 16) -> None:
    """Write a LoRA folder of random weights for all projections, as mlx-lm's tuner leaves it."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, width = config["num_attention_heads"], config["head_dim"]
    keys, values = config["num_key_value_heads"] * width, heads * width
    widths = {
        "self_attn.q_proj": (hidden, values),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (values, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    mx.random.seed(seed)
    weights: dict[str, mx.array] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in widths.items():
            place = f"model.layers.{layer}.{name}"
            a = mx.random.normal((inputs, rank)) * inputs**-0.5
            weights[f"{place}.lora_a"] = a.astype(dtype)
            weights[f"{place}.lora_b"] = (mx.random.normal((rank, outputs)) * 0.02).astype(dtype)
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": list(widths)}
    described = {
        "fine_tune_type": "lora",
        "num_layers": config["num_hidden_layers"],
        "lora_parameters": parameters,
    }
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    (path / "adapter_config.json").write_text(json.dumps(described))


def prompts(rows: int, length: int, vocab: int) -> list[list[int]]:
    """Different ids for every row."""
    return [[1 + (r * 7919 + i * 104729) % (vocab - 1) for i in range(length)] for r in range(rows)]


def lone(model: nn.Module, prompt: Sequence[int], tokens: int) -> float:
    """Tokens per second of mlx-lm's ``generate_step`` after its first token."""
    stream: Iterator[object] = generate_step(mx.array(list(prompt)), model, max_tokens=tokens + 1)
    next(stream)
    began = time.perf_counter()
    made = sum(1 for _ in stream)
    return made / (time.perf_counter() - began)


def batched(model: nn.Module, asked: list[list[int]], tokens: int) -> float:
    """Tokens per second of mlx-lm's ``BatchGenerator`` while all rows decode."""
    generator = BatchGenerator(
        model,
        max_tokens=tokens + 8,
        completion_batch_size=len(asked),
        prefill_batch_size=len(asked),
    )
    generator.insert(asked)
    while len(generator.next_generated()) < len(asked):
        pass
    began = time.perf_counter()
    made = sum(len(generator.next_generated()) for _ in range(tokens))
    seconds = time.perf_counter() - began
    generator.close()
    return made / seconds


def main() -> None:
    """Measure every size and print one line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3b")
    parser.add_argument("--bits", type=int, default=0, help="0: bfloat16 (float32 on CPU)")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=0, help="also: 32 rows with so many")
    parser.add_argument("--long", type=int, default=0, help="also: one row of this length")
    options = parser.parse_args()
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.shape, options.bits, dtype)
        rig = Rig(Path(folder))
        theirs, _ = load_model(Path(folder))
        sizes = map(int, filter(None, options.rows.split(",")))
        results = [measure(rig, theirs, rows, options) for rows in sizes]
        if options.long:
            results.append(uneven(rig, options))
        if options.adapters:
            results.append(adapted(rig, Path(folder), options))
    print(json.dumps(results))


def measure(
    rig: Rig, theirs: nn.Module, rows: int, options: argparse.Namespace
) -> dict[str, float]:
    """All sides at one number of rows."""
    asked = prompts(rows, options.prompt, rig.info.vocab_size)
    sides: dict[str, list[float]] = {"ours": [], "BatchGenerator": []}
    if rows == 1:
        sides["generate_step"] = []
    for turn in range(options.repeat + 1):
        seen = {
            "ours": rig.rate(asked, options.tokens),
            "BatchGenerator": batched(theirs, asked, options.tokens),
        }
        if rows == 1:
            seen["generate_step"] = lone(theirs, asked[0], options.tokens)
        for side, value in seen.items():
            if turn:
                sides[side].append(value)
    medians = {side: statistics.median(values) for side, values in sides.items()}
    ratios = {
        f"ours / {side}": medians["ours"] / value
        for side, value in medians.items()
        if side != "ours"
    }
    print(f"rows {rows}:", {k: round(v, 2) for k, v in (medians | ratios).items()}, flush=True)
    return {"rows": rows, **medians, **ratios}


def uneven(rig: Rig, options: argparse.Namespace) -> dict[str, float]:
    """31 short rows and one long one against 32 short rows, seconds a step."""
    short = prompts(32, options.prompt, rig.info.vocab_size)
    long = prompts(1, options.long, rig.info.vocab_size)
    flat, mixed = [], []
    for turn in range(options.repeat + 1):
        flat.append(32 / rig.rate(short, options.tokens))
        mixed.append(32 / rig.rate([*short[:31], *long], options.tokens))
        if not turn:
            flat, mixed = [], []
    one, other = statistics.median(flat), statistics.median(mixed)
    print(f"32 short {one * 1e3:.2f} ms, with one of {options.long}: {other * 1e3:.2f} ms, "
          f"{other / one:.2f} ×", flush=True)  # fmt: skip
    return {"short_step": one, "uneven_step": other}


def adapted(rig: Rig, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """32 rows with adapters and without, interleaved, against 32 without, seconds a step."""
    dtype = mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32
    mounted: list[tuple[str, ...]] = []
    for number in range(options.adapters):
        path = folder / f"adapter-{number}"
        make_adapter(path, options.shape, number + 1, dtype)
        mounted.append((rig.device.mount(path.name, path).revision,))
    asked = prompts(32, options.prompt, rig.info.vocab_size)
    turns = [*mounted, ()]
    sides: dict[str, list[tuple[str, ...]]] = {
        "base": [()] * 32,
        "mixed": [turns[row % len(turns)] for row in range(32)],
        "one for all": [mounted[0]] * 32,
    }
    steps: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.repeat + 1):
        for side, chains in sides.items():
            seconds = 32 / rig.rate(asked, options.tokens, adapters=chains)
            if turn:
                steps[side].append(seconds)
    medians = {side: statistics.median(seen) for side, seen in steps.items()}
    for side, seconds in medians.items():
        print(f"32 rows, {side}: {seconds * 1e3:.2f} ms a step, "
              f"{seconds / medians['base']:.3f} ×", flush=True)  # fmt: skip
    return {f"{side}_step": seconds for side, seconds in medians.items()}


if __name__ == "__main__":
    main()
