"""What KV schemes save and what they cost: bytes per token, and divergence from plain keys.

    .venv/bin/python bench/kv.py [--model DIR] [--rows 8] [--tokens 128] [--schemes 8,turbo,4]

Bytes are read off the live arrays of a batch in bfloat16. The divergence is KL(plain ‖ scheme) of
the next token in nats, teacher-forced, one token a step, so that every token reads encoded ones;
the texts are this project's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from rig import Rig, ready

ready()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from mlx_troupe.runtime.engine.batch import RowBatch  # noqa: E402
from mlx_troupe.runtime.engine.kvplan import make_plan  # noqa: E402
from mlx_troupe.runtime.kvschemes import parse_kv_quant  # noqa: E402
from mlx_troupe.runtime.plans import RowId  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CAPACITY = 64
BARS = {"4": 0.29, "8": 0.54, "turbo:k8v3": 0.40, "turbo": 0.40}


def bytes_per_token(path: Path, scheme: str) -> float:
    """Bytes per token of capacity of two rows that decode together, all layers, in bfloat16."""
    rig = Rig(path, dtype="bfloat16", kv=parse_kv_quant(scheme))
    rows = rig.start([tuple(range(2, 12)), tuple(range(3, 19))])
    rig.step(decode=rows)
    held = rig.device.stats().kv_bytes / (len(rows) * CAPACITY)
    rig.device.close()
    return held


def texts(path: Path, rows: int, tokens: int) -> list[list[int]]:
    """Ids of ``rows`` stretches of this project's documents."""
    from mlx_troupe.runtime.engine.tokenizer import load_tokenizer

    prose = "\n".join((ROOT / name).read_text("utf-8") for name in ("README.md", "ARCHITECTURE.md"))
    ids = list(load_tokenizer(path).encode(prose, add_special_tokens=False))
    step = (len(ids) - tokens) // max(rows - 1, 1)
    return [ids[row * step : row * step + tokens] for row in range(rows)]


def teacher_forced(model: Any, path: Path, scheme: str, ids: Sequence[Sequence[int]]) -> mx.array:
    """Log-probabilities [rows, tokens - 1, V] of every next token."""
    batch = RowBatch(model, make_plan(model, parse_kv_quant(scheme), path))
    for row in range(len(ids)):
        batch.join(RowId(row), model_caches(model), 0)
    steps = []
    for at in range(len(ids[0]) - 1):
        caches = batch.begin(1)
        order = list(batch.rows)
        logits = model(mx.array([[ids[row][at]] for row in order]), cache=caches)[:, 0]
        logits = logits[mx.array([order.index(RowId(row)) for row in range(len(ids))])]
        logits = logits.astype(mx.float32)
        steps.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(steps[-1], batch.arrays)
        batch.commit(1)
    return mx.stack(steps, axis=1)


def model_caches(model: Any) -> list[Any]:
    """Empty caches of one row."""
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches


def divergence(plain: mx.array, other: mx.array) -> list[float]:
    """KL in nats of every row and position."""
    rows = [(mx.exp(p) * (p - o)).sum(-1) for p, o in zip(plain, other, strict=True)]
    return [x for row in rows for x in np.array(row).tolist()]


def main() -> None:
    """Print one line a scheme and a JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--schemes", default="8,turbo:k8v3,4")
    options = parser.parse_args()
    if options.model is None:
        from mlx_troupe.runtime.store.starter import ensure_starter

        options.model = ensure_starter()
    schemes = options.schemes.split(",")
    full = bytes_per_token(options.model, "off")
    shares = {scheme: bytes_per_token(options.model, scheme) / full for scheme in schemes}
    rig = Rig(options.model)
    ids = texts(options.model, options.rows, options.tokens)
    plain = teacher_forced(rig.model, options.model, "off", ids)
    figures = {}
    for scheme in schemes:
        found = divergence(plain, teacher_forced(rig.model, options.model, scheme, ids))
        mean, worst = statistics.fmean(found), max(found)
        figures[scheme] = {"share": round(shares[scheme], 4), "kl": mean, "kl_max": worst}
        bar = f" (bar {BARS[scheme]})" if scheme in BARS else ""
        print(f"{scheme:12} {shares[scheme]:.4f} of 16-bit bytes{bar}, KL {mean:.5f}, {worst:.3f}")
    print(json.dumps({"bytes_per_token_16_bit": full, "schemes": figures}))


if __name__ == "__main__":
    main()
