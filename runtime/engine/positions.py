"""A cheaper rotary embedding for batched rows on the CPU.

For rows with offsets of their own, MLX computes sines and cosines anew in every layer, once for the
queries and once for the keys. :class:`RowsRoPE` computes them once a step, for all layers with the
same parameters, with equal bits. A lone row keeps mlx's own. Runs on the device thread.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Tables:
    """Cosines and sines of the last step that asked; ``dims``, ``base``, ``scale`` of nn.RoPE."""

    def __init__(self, dims: int, base: float, scale: float) -> None:
        self._half = dims // 2
        self._step = -math.log(base) / self._half
        self._scale = scale
        self._offsets: mx.array | None = None
        self._columns = 0
        self._made = mx.zeros(()), mx.zeros(())

    def at(self, offsets: mx.array, columns: int) -> tuple[mx.array, mx.array]:
        """Factors of a value and of its partner, [B, 1, columns, dims] each.

        Steps are told apart by the identity of their ``offsets`` [B], which nobody changes.
        """
        if offsets is not self._offsets or columns != self._columns:
            self._offsets, self._columns = offsets, columns
            places = (offsets[:, None] + mx.arange(columns)).astype(mx.float32) * self._scale
            turns = mx.exp(mx.arange(self._half).astype(mx.float32) * self._step)
            angles = places[:, None, :, None] * turns
            cosines, sines = mx.cos(angles), mx.sin(angles)
            self._made = mx.concatenate([cosines] * 2, -1), mx.concatenate([-sines, sines], -1)
        return self._made

    def forget(self) -> None:
        """Let go of the last step's."""
        self._offsets = None
        self._made = mx.zeros(()), mx.zeros(())


class RowsRoPE(nn.RoPE):
    """nn.RoPE, told the offsets of several rows; anything else goes to mlx's own."""

    def __init__(self, like: nn.RoPE, tables: Tables) -> None:
        super().__init__(like.dims, like.traditional, like.base, like.scale)
        self.tables = tables

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate ``x`` [B, H, L, D]; ``offset`` is an int or int32 [B]."""
        if not (isinstance(offset, mx.array) and offset.ndim == 1 and x.dtype == mx.float32):
            return super().__call__(x, offset)
        if x.ndim != 4 or x.shape[-1] != self.dims:
            return super().__call__(x, offset)
        own, partner = self.tables.at(offset, x.shape[2])
        half = self.dims // 2
        return x * own + mx.concatenate([x[..., half:], x[..., :half]], -1) * partner


def forget_positions(model: nn.Module) -> None:
    """Let go of what the last step of batched rows left: its size is that of its batch."""
    for module in model.modules():
        if isinstance(module, RowsRoPE):
            module.tables.forget()


def install_rope(model: nn.Module) -> None:
    """Replace the model's plain nn.RoPE modules, if the device is the CPU. Idempotent."""
    if mx.default_device() != mx.cpu:
        return
    tables: dict[tuple[int, float, float], Tables] = {}
    for module in model.modules():
        for name, child in module.children().items():
            if type(child) is nn.RoPE and not child.traditional:
                key = child.dims, child.base, child.scale
                shared = tables.setdefault(key, Tables(*key))
                setattr(module, name, RowsRoPE(child, shared))
