"""Whether a loaded model's rows may share a forward pass, tried out at load.

Owns nothing; runs on the device thread before the first row. Three tests, cheapest first: the
kinds of cache, the way the model's source computes attention, and two short rows alone and
together.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..device import RowId
from .activations import install_swiglu
from .attention import NAME, install_attention
from .families import adapt, computes_own_scores
from .lone import window_of_cache
from .positions import install_rope

LENGTHS = (5, 9)


def why_not_batchable(model: nn.Module) -> str | None:
    """The reason why rows of this model must run one by one, in words; None if they need not."""
    family = model_family(model)
    try:
        for cache in make_prompt_cache(model):
            window_of_cache(cache)
    except TypeError as error:
        return f"{family}: {error}"
    adapt(model)
    if not names_attention(model):
        return f"{family} computes attention in a way of its own"
    install_attention()
    install_swiglu()
    install_rope(model)
    try:
        agree = rows_agree(model)
    except Exception as error:
        return f"batched rows of {family} fail: {type(error).__name__}: {error}"
    return None if agree else f"batched rows of {family} disagree with single rows"


def model_family(model: nn.Module) -> str:
    """``llama``, ``qwen3`` …"""
    return str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1]))


def names_attention(model: nn.Module) -> bool:
    """Whether any module that the model's layers come from calls attention that we can reach."""
    if computes_own_scores(model):
        return True
    sources = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(source), NAME) for source in sources)


def rows_agree(model: nn.Module) -> bool:
    """Run two rows of different lengths alone, prefilled together, and one step as a batch."""
    from .batch import RowBatch

    ids = [_ids(model, length + 1) for length in LENGTHS]
    rows = [make_prompt_cache(model) for _ in ids]
    alone = [model(mx.array([t]), cache=make_prompt_cache(model))[0] for t in ids]
    batch = RowBatch(model)
    if all(type(cache) is KVCache for cache in rows[0]):
        for i, row in enumerate(rows):
            batch.join(RowId(i), row)
        caches = batch.begin(max(LENGTHS))
        padded = [
            ids[row][: LENGTHS[row]] + [0] * (max(LENGTHS) - LENGTHS[row]) for row in batch.rows
        ]
        together = model(mx.array(padded), cache=caches)
        prefilled = {row: together[place, : LENGTHS[row]] for place, row in enumerate(batch.rows)}
        batch.commit([LENGTHS[row] for row in batch.rows])
    else:
        prefilled = {
            RowId(i): model(mx.array([tokens[:-1]]), cache=row)[0]
            for i, (tokens, row) in enumerate(zip(ids, rows, strict=True))
        }
        for i, row in enumerate(rows):
            batch.join(RowId(i), row)
    caches = batch.begin(1)
    step = model(mx.array([[ids[row][-1]] for row in batch.rows]), cache=caches)
    return all(
        _close(alone[i][:length], prefilled[i]) and _close(alone[i][length], step[place, 0])
        for place, i in enumerate(batch.rows)
        for length in (LENGTHS[i],)
    )


def _ids(model: nn.Module, count: int) -> list[int]:
    args: Any = getattr(model, "args", None)
    vocabulary = getattr(args, "vocab_size", None)
    draw = random.Random(count)
    return [draw.randrange(min(int(vocabulary or 64), 1024)) for _ in range(count)]


def _close(expected: mx.array, got: mx.array) -> bool:
    """Logits equal up to what the arithmetic's type explains, relative to the largest."""
    if expected.shape != got.shape:
        return False
    tolerance = _tolerance(expected.dtype)
    expected, got = expected.astype(mx.float32), got.astype(mx.float32)
    largest = mx.abs(expected).max()
    return bool((mx.abs(expected - got).max() <= tolerance * largest).item())


def _tolerance(dtype: mx.Dtype) -> float:
    if dtype == mx.float32:
        # CUDA multiplies float32 matrices in TF32 by default.
        return 1e-3 if mx.default_device() == mx.cpu else 1e-2
    return 5e-2 if dtype == mx.bfloat16 else 1e-2
