"""Whether a model's attention can take encoded keys and values, tried out at load.

Owns nothing; runs on the device thread before the first row, and only when a KV scheme was asked
for. Families that read their caches in a way of their own fail here, by name, and not in the
middle of somebody's answer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import ModelError
from ..kvschemes import KVScheme, name_of
from ..plans import RowId
from .attention import install_attention
from .batch import RowBatch
from .families import computes_own_scores
from .kvplan import KVPlan, make_plan
from .nesting import flatten
from .selfcheck import model_family, names_attention
from .snapshots import clone_all

LENGTHS = (5, 9)
TOLERANCE = 2e-2


def plan_for(
    model: nn.Module, scheme: KVScheme, folder: Path, lone_reason: str
) -> tuple[KVPlan, str]:
    """The plan for a loaded model, and why its rows must run alone: ``lone_reason`` or a new one.

    Raises ModelError, naming both sides, for a scheme that the model cannot take.
    """
    plan = make_plan(model, scheme, folder)
    if plan.block and lone_reason:
        family = model_family(model)
        raise ModelError(f"--paged-kv and {family}: its rows share no steps: {lone_reason}")
    if not plan.encodes:
        return plan, lone_reason
    both = f"--kv-quant {name_of(scheme)} and {model_family(model)}"
    if (why := why_not_encodable(model, plan)) is not None:
        raise ModelError(f"{both}: {why}")
    if lone_reason or (why := why_encoded_rows_disagree(model, plan)) is None:
        return plan, lone_reason
    return plan, f"{both}: {why}"


def why_not_encodable(model: nn.Module, plan: KVPlan) -> str | None:
    """The reason why a row of this model cannot be encoded, in words; None if it can."""
    if computes_own_scores(model) or not names_attention(model):
        return "it computes attention in a way of its own"
    install_attention()
    now = replace(plan, start=0)
    try:
        caches = _encoded_row(model, now, LENGTHS[0])
        logits = [model(mx.array([ids]), cache=caches) for ids in ([1], [2, 3])]
        finite = mx.all(mx.isfinite(mx.concatenate(logits, axis=1))).item()
    except Exception as error:
        return f"its attention fails: {type(error).__name__}: {error}"
    return None if finite else "its attention yields no numbers"


def why_encoded_rows_disagree(model: nn.Module, plan: KVPlan) -> str | None:
    """The reason why encoded rows must run one by one, in words; None if they need not.

    Two rows alone and as a batch: one joins encoded, the other is encoded there.
    """
    now = replace(plan, start=0)
    rows = {RowId(place): length for place, length in enumerate(LENGTHS)}
    try:
        batch = RowBatch(model, now)
        alone: dict[RowId, mx.array] = {}
        for row, length in rows.items():
            plain = _plain_row(model, length)
            batch.join(row, now.converted(clone_all(plain), length) if row else plain, length)
            alone[row] = model(mx.array([[1]]), cache=now.converted(clone_all(plain), length))[0]
        batch.convert(RowId(0))
        caches = batch.begin(1)
        together = model(mx.array([[1]] * len(rows)), cache=caches)
        agree = all(_close(alone[row], together[at]) for at, row in enumerate(batch.rows))
    except Exception as error:
        return f"encoded rows fail in a batch: {type(error).__name__}: {error}"
    return None if agree else "encoded rows disagree with single rows"


def _plain_row(model: nn.Module, length: int) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.arange(1, length + 1)[None], cache=caches)
    return caches


def _encoded_row(model: nn.Module, plan: KVPlan, length: int) -> list[Any]:
    """Raises TypeError if a layer did not become what it should."""
    caches = plan.converted(_plain_row(model, length), length)
    for cache, codec in zip(flatten(caches), plan.codecs, strict=True):
        if codec is not None and not codec.is_held_by(cache):
            raise TypeError(f"{type(cache).__name__} does not hold {codec.name}")
    return caches


def _close(expected: mx.array, got: mx.array) -> bool:
    expected, got = expected.astype(mx.float32), got.astype(mx.float32)
    tolerance = TOLERANCE if expected.dtype == mx.float32 else 5 * TOLERANCE
    return bool((mx.abs(expected - got).max() <= tolerance * mx.abs(expected).max()).item())
