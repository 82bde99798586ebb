"""Models that compute attention themselves, taught to let a batch's view do it.

mlx-lm's Gemma 2 bends its scores with a softcap and so calls no attention function that could be
replaced by name. Its layers are given a subclass of their own class: with the caches of a batch it
asks their view, told the softcap; with any other cache it is mlx-lm's own code, bit for bit. Runs
on the device thread; owns nothing.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma2

from .attention import AttentionView, window_of

_Gemma2Attention: Any = gemma2.Attention


class CappedAttention(_Gemma2Attention):
    """Gemma 2's attention for batched rows."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """``x`` and the result are [B, L, hidden]."""
        if not _is_view(cache):
            return super().__call__(x, mask, cache)
        rows, columns, _ = x.shape

        def heads(projected: mx.array, count: int) -> mx.array:
            return projected.reshape(rows, columns, count, -1).transpose(0, 2, 1, 3)

        queries = self.rope(heads(self.q_proj(x), self.n_heads), offset=cache.offset)
        keys = self.rope(heads(self.k_proj(x), self.n_kv_heads), offset=cache.offset)
        view, _ = cache.update_and_fetch(keys, heads(self.v_proj(x), self.n_kv_heads))
        cap = self.attn_logit_softcapping
        output = view.attend(queries, self.scale, window_of(mask), None, softcap=cap)
        joined: mx.array = self.o_proj(output.transpose(0, 2, 1, 3).reshape(rows, columns, -1))
        return joined


def _is_view(cache: Any) -> bool:
    return isinstance(cache, AttentionView)


_ADAPTED: dict[type, type] = {_Gemma2Attention: CappedAttention}


def adapt(model: nn.Module) -> None:
    """Give the model's own attention modules ours, where there is one. Idempotent."""
    for module in model.modules():
        if (ours := _ADAPTED.get(type(module))) is not None:
            module.__class__ = ours


def computes_own_scores(model: nn.Module) -> bool:
    """Whether :func:`adapt` found work: such layers read plain keys and values only."""
    return any(type(module) in _ADAPTED.values() for module in model.modules())
