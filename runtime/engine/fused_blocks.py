"""Decode steps of the ordinary transformer block in fewer operations.

Most of mlx-lm's families are built of the same three parts: a block that adds and normalises twice,
attention with a rotary embedding, a gated feed-forward layer. :func:`fuse_blocks` gives modules
whose source reads like one of them a subclass of their own class, which takes one token a row with
a batch's cache in fewer operations (``fused_kernels``) and leaves everything else to the class.
Results may differ in the last bit, so that exact rows do without; a part that reads otherwise, or
that holds modules of other kinds, stays as it is. Runs on the device thread, once, at load.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import Llama3RoPE

from . import fused_kernels
from .attention import window_of
from .fused_kernels import Rotation
from .fusing import JointProduct, product_of
from .layouts import RowsCache
from .positions import RowsRoPE


class Ahead:
    """A block's output and its norm, for the module that will be asked for that next."""

    def __init__(self) -> None:
        self._of: mx.array | None = None
        self._normed: mx.array | None = None

    def put(self, x: mx.array, normed: mx.array) -> None:
        """Keep the norm of ``x``."""
        self._of, self._normed = x, normed

    def take(self, x: mx.array) -> mx.array | None:
        """The norm of ``x``, if that is what was put."""
        normed = self._normed if self._of is x else None
        self._of = self._normed = None
        return normed


class AheadNorm(nn.RMSNorm):
    """An RMSNorm whose result may be there already."""

    def __call__(self, x: mx.array) -> mx.array:
        normed: mx.array | None = self.ahead.take(x)
        return super().__call__(x) if normed is None else normed


class _FusedBlock(nn.Module):
    """Adds and normalises in one operation, for the next block too."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        if not _is_decode(x, cache):
            return super().__call__(x, mask, cache)
        residual = self.self_attn(self.input_layernorm(x), mask, cache)
        x, normed = _add_norm(x, residual, self.post_attention_layernorm)
        x, normed = _add_norm(x, self.mlp(normed), self.follower.module)
        self.follower.module.ahead.put(x, normed)
        return x


class _FusedAttention(nn.Module):
    """Splits, normalises and turns its heads in one operation."""

    norms: tuple[str, ...] = ()

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        product = _joint_of((self.q_proj, self.k_proj, self.v_proj))
        if product is None or not _is_decode(x, cache):
            return super().__call__(x, mask, cache)
        norms = [self[name] for name in self.norms]
        queries, keys, values = _split_heads(self, product.joint(x), cache.offset, norms)
        view, _ = cache.update_and_fetch(keys, values)
        output = view.attend(queries, self.scale, window_of(mask), None)
        # With one column, heads lie as the output projection takes them.
        return self.o_proj(output.reshape(x.shape[0], 1, -1))


class _FusedNormedAttention(_FusedAttention):
    norms = ("q_norm", "k_norm")


class _FusedFeedForward(nn.Module):
    """Gates the joint product as it is."""

    norms = ()

    def __call__(self, x: mx.array) -> Any:
        product = _joint_of((self.gate_proj, self.up_proj))
        if product is None or x.ndim != 3 or x.shape[1] != 1:
            return super().__call__(x)
        joint = product.joint(x)
        if fused_kernels.fits_gated(joint):
            return self.down_proj(fused_kernels.gated(joint))
        gate, up = mx.split(joint, 2, axis=-1)
        return self.down_proj(swiglu(gate, up))


_BASES: dict[str, Any] = {
    "23dca43361e0322c": _FusedBlock,
    "6a69d1668b833e94": _FusedBlock,
    "3e319e5ce124a425": _FusedAttention,
    "724d769c8e480f11": _FusedNormedAttention,
    "5f04cb2f29341a1d": _FusedFeedForward,
    "067cdc6f38be4e8f": _FusedFeedForward,
}
"""What takes over, by the digest of the source that it stands for."""

_WORDS = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def fuse_blocks(model: nn.Module) -> int:
    """Fuse the model's ordinary parts; returns how many there are. Idempotent.

    Call it after projections are fused.
    """
    made = 0
    followers = _followers(model)
    ahead = Ahead()
    for module in model.modules():
        kind: Any = type(module)
        base = _BASES.get(source_digest(kind))
        if base is None or not _has_plain_norms(module, base):
            continue
        if base is _FusedBlock:
            follower: Any = followers.get(id(module))
            if follower is None:
                continue
            follower.__class__, follower.ahead = AheadNorm, ahead
            module.follower = _Beside(follower)
        module.__class__ = _fused(base, kind)
        made += 1
    return made


def unfuse_blocks(model: nn.Module) -> int:
    """Take :func:`fuse_blocks` back; returns how many parts there were."""
    taken = 0
    for module in model.modules():
        if isinstance(module, _FusedBlock | _FusedAttention | _FusedFeedForward):
            module.__class__ = type(module).__bases__[1]
            taken += 1
        elif type(module) is AheadNorm:
            module.__class__ = nn.RMSNorm
    return taken


@cache
def source_digest(kind: Any) -> str:
    """Of the parameters and the words of what a class does when called, formatting aside.

    Empty where there is no source, or where it is not all that is done.
    """
    call: Any = kind.__call__
    if hasattr(call, "__wrapped__"):
        return ""
    try:
        source = textwrap.dedent(inspect.getsource(call))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        words = iter([token.string for token in tokens if token.type in _WORDS])
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""
    depth = 0
    for word in words:
        depth += (word in "([{") - (word in ")]}")
        if word == ":" and depth == 0:
            break
    body = " ".join([*inspect.signature(call).parameters, *words])
    return hashlib.sha256(body.replace(", )", ")").encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """A module that another one uses without owning its weights."""

    module: Any


@cache
def _fused(base: Any, kind: Any) -> Any:
    # Of the same module, by which a model's kind of attention is told.
    return type(f"Fused{kind.__name__}", (base, kind), {"__module__": kind.__module__})


def _followers(model: nn.Module) -> dict[int, nn.Module]:
    """The norm that a block's output goes to next, by the id of the block."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layers = module.get("layers")
        if not isinstance(layers, list):
            continue
        norms = [*(_child(layer, "input_layernorm") for layer in layers[1:]), module.get("norm")]
        found |= {id(b): n for b, n in zip(layers, norms, strict=True) if _is_plain(n)}
    return found


def _child(layer: Any, name: str) -> Any:
    """Layers of a list need not be modules."""
    return layer.get(name) if isinstance(layer, nn.Module) else None


def _has_plain_norms(module: nn.Module, base: Any) -> bool:
    norms: list[Any] = [module.get(name) for name in base.norms]
    # One kernel normalises queries and keys, with one epsilon.
    apart = issubclass(base, _FusedAttention) and len({getattr(n, "eps", 0) for n in norms}) > 1
    return all(map(_is_plain, norms)) and not apart


def _is_plain(norm: Any) -> bool:
    return type(norm) in (nn.RMSNorm, AheadNorm)


def _is_decode(x: mx.array, cache: Any) -> bool:
    """One token a row, of rows with offsets of their own."""
    return x.ndim == 3 and x.shape[1] == 1 and isinstance(cache, RowsCache)


def _joint_of(parts: Sequence[Any]) -> JointProduct | None:
    """The product that computes just these."""
    products = {id(product_of(part)): product_of(part) for part in parts}
    return product_of(parts[0]) if len(products) == 1 else None


def _add_norm(x: mx.array, residual: mx.array, norm: Any) -> tuple[mx.array, mx.array]:
    if fused_kernels.fits_add_norm(x, residual, norm.weight):
        return fused_kernels.add_norm(x, residual, norm.weight, norm.eps)
    total = x + residual
    return total, mx.fast.rms_norm(total, norm.weight, norm.eps)


def _split_heads(
    attention: Any, joint: mx.array, offsets: mx.array, norms: Sequence[Any]
) -> tuple[mx.array, mx.array, mx.array]:
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    weights = [norm.weight for norm in norms]
    rotation = rotation_of(attention.rope)
    if rotation is not None and fused_kernels.fits_heads(joint, heads, kv_heads, rotation, weights):
        eps = norms[0].eps if norms else 0.0
        return fused_kernels.split_heads(joint, offsets, heads, kv_heads, rotation, weights, eps)
    rows, width = joint.shape[0], joint.shape[-1] // (heads + 2 * kv_heads)
    ends = [heads, heads + kv_heads]
    split: Any = mx.split(joint.reshape(rows, 1, -1, width), ends, axis=2)
    queries, keys, values = split
    if norms:
        queries, keys = (norm(x) for norm, x in zip(norms, (queries, keys), strict=True))
    queries, keys, values = (x.transpose(0, 2, 1, 3) for x in (queries, keys, values))
    rope = attention.rope
    return rope(queries, offset=offsets), rope(keys, offset=offsets), values


def rotation_of(rope: Any) -> Rotation | None:
    """What a module does to heads, if it is one of those that only call ``mx.fast.rope``."""
    if type(rope) in (nn.RoPE, RowsRoPE):
        return Rotation(rope.dims, rope.traditional, rope.base, rope.scale)
    if type(rope) is Llama3RoPE:
        return Rotation(rope.dims, rope.traditional, None, 1.0, rope._freqs)
    return None
