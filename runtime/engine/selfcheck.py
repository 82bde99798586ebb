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
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..plans import RowId
from .activations import install_swiglu
from .attention import NAME, install_attention
from .families import adapt, computes_own_scores
from .lone import window_of_cache
from .nesting import flatten
from .positions import install_rope

LENGTHS = (5, 9)


def why_not_batchable(model: nn.Module) -> str | None:
    """The reason why rows of this model must run one by one, in words; None if they need not."""
    family = model_family(model)
    try:
        caches = flatten(make_prompt_cache(model))
        counted = [cache for cache in caches if type(cache) is not ArraysCache]
        for cache in counted:
            window_of_cache(cache)
    except TypeError as error:
        return f"{family}: {error}"
    adapt(model)
    if counted and not names_attention(model):
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
    """Run rows of different lengths alone and as a batch, prefilled together if all is plain."""
    plain = all(type(cache) is KVCache for cache in flatten(make_prompt_cache(model)))
    return _agree_together(model) if plain else _agree_decoding(model)


def may_prefill_together(model: nn.Module) -> bool:
    """Whether padding leaves a batchable model's rows as they were; tried with recurrent ones."""
    kinds = {type(cache) for cache in flatten(make_prompt_cache(model))}
    if kinds == {KVCache}:
        return True
    try:
        return kinds <= {KVCache, ArraysCache} and _agree_together(model)
    except Exception:
        return False


def _agree_together(model: nn.Module) -> bool:
    """Two rows prefilled in one padded pass, and one step as a batch."""
    ids = {RowId(i): _ids(model, length + 1) for i, length in enumerate(LENGTHS)}
    alone = _run_alone(model, ids)
    batch = _batch_of(model, {row: make_prompt_cache(model) for row in ids}, dict.fromkeys(ids, 0))
    counts = {row: len(tokens) - 1 for row, tokens in ids.items()}
    longest = max(counts.values())
    caches = batch.begin(longest, counts)
    padded = [ids[row][:-1] + [0] * (longest - counts[row]) for row in batch.rows]
    got = model(mx.array(padded), cache=caches)
    for place, row in enumerate(batch.rows):
        if not _close(alone[row][: counts[row]], got[place, : counts[row]]):
            return False
    batch.commit([counts[row] for row in batch.rows])
    return _steps_agree(model, batch, ids, alone)


def _agree_decoding(model: nn.Module) -> bool:
    """Rows prefilled alone, one of them empty, and two steps as a batch."""
    lengths = dict(enumerate((*LENGTHS, 0)))
    ids = {RowId(i): _ids(model, length + 2) for i, length in lengths.items()}
    alone = _run_alone(model, ids)
    caches = {row: make_prompt_cache(model) for row in ids}
    for row, tokens in ids.items():
        if len(tokens) > 2:
            model(mx.array([tokens[:-2]]), cache=caches[row])
    batch = _batch_of(model, caches, {RowId(i): length for i, length in lengths.items()})
    return _steps_agree(model, batch, ids, alone)


def _run_alone(model: nn.Module, ids: dict[RowId, list[int]]) -> dict[RowId, mx.array]:
    return {row: model(mx.array([t]), cache=make_prompt_cache(model))[0] for row, t in ids.items()}


def _batch_of(model: nn.Module, caches: dict[RowId, Any], lengths: dict[RowId, int]) -> Any:
    from .batch import RowBatch

    batch = RowBatch(model)
    for row, length in lengths.items():
        batch.join(row, caches[row], length)
    return batch


def _steps_agree(
    model: nn.Module, batch: Any, ids: dict[RowId, list[int]], alone: dict[RowId, mx.array]
) -> bool:
    """Go on to the rows' last ids, one at a time."""
    while all(batch.length(row) < len(tokens) for row, tokens in ids.items()):
        caches = batch.begin(1)
        at = {row: batch.length(row) for row in batch.rows}
        got = model(mx.array([[ids[row][at[row]]] for row in batch.rows]), cache=caches)
        for place, row in enumerate(batch.rows):
            if not _close(alone[row][at[row]], got[place, 0]):
                return False
        batch.commit(1)
    return True


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
