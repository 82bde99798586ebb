"""A faster ``swiglu`` for batched rows on the CPU.

MLX's CPU exponential is scalar code (about 23 ns a value), its power is not (about 7 ns): for 16
rows of SmolLM2-135M the gates alone take 21 of some 60 ms a step, and 8 this way, equal to 1e-6.
A lone row keeps mlx-lm's own function, and with it mlx-lm's bits. Owns no state.
"""

from __future__ import annotations

import math
import sys

import mlx.core as mx
from mlx_lm.models.activations import swiglu as mlx_lm_swiglu

NAME = "swiglu"
LOG2_E = math.log2(math.e)
# Experts see tokens, not rows, on their first axis, so a lone row could not be told there.
_LEFT_ALONE = ("mlx_lm.models.activations", "mlx_lm.models.switch_layers")


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) · x``; of several rows ([B, L, D] with B > 1) in float32 by powers of two."""
    if gate.ndim != 3 or gate.shape[0] == 1 or gate.dtype != mx.float32:
        return mlx_lm_swiglu(gate, x)
    return gate * x / (1 + mx.power(2.0, gate * -LOG2_E))


def install_swiglu() -> None:
    """Put ours wherever mlx-lm's stands by name, if the device is the CPU. Idempotent."""
    if mx.default_device() != mx.cpu:
        return
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", {})
        if name not in _LEFT_ALONE and names.get(NAME) is mlx_lm_swiglu:
            names[NAME] = swiglu
