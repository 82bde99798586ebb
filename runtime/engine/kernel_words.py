"""Making GPU kernels, also such as serve CUDA and Metal by one body: the words that differ.

Pure; knows no kernel. Called on the device thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import mlx.core as mx

TYPES = (mx.float16, mx.bfloat16, mx.float32)

_PACK = """
template <typename T, int N> struct alignas(N * sizeof(T)) Pack { T v[N]; };
"""
_CUDA = (
    """
#define TID int(threadIdx.x)
#define BLOCK_X int(blockIdx.x)
#define BLOCK_Y int(blockIdx.y)
#define SHARED __shared__
#define GLOBAL
#define BARRIER __syncthreads()
#define XOR(x, n) __shfl_xor_sync(0xffffffffu, x, n)
#define EXP2(x) exp2f(x)
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define RSQRT(x) rsqrtf(x)
#define MAX(a, b) fmaxf(a, b)
#define NEVER (-__int_as_float(0x7f800000))
"""
    + _PACK
)
_METAL = (
    """
#define TID int(thread_position_in_threadgroup.x)
#define BLOCK_X int(threadgroup_position_in_grid.x)
#define BLOCK_Y int(threadgroup_position_in_grid.y)
#define SHARED threadgroup
#define GLOBAL device
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define XOR(x, n) simd_shuffle_xor(x, n)
#define EXP2(x) exp2(x)
#define COS(x) cos(x)
#define SIN(x) sin(x)
#define RSQRT(x) rsqrt(x)
#define MAX(a, b) max(a, b)
#define NEVER (-INFINITY)
"""
    + _PACK
)


def make_kernel(
    name: str, inputs: list[str], outputs: list[str], source: str, header: str = ""
) -> Callable[..., Any]:
    """A kernel of a body that serves CUDA and Metal; its words are defined above."""
    if not mx.metal.is_available():
        return make_cuda_kernel(name, inputs, outputs, source, _CUDA + header)
    make: Any = mx.fast.metal_kernel
    return _made(make, name, inputs, outputs, source, _METAL + header)


def make_cuda_kernel(
    name: str, inputs: list[str], outputs: list[str], source: str, header: str = ""
) -> Callable[..., Any]:
    """A kernel of a body that is CUDA's own."""
    make: Any = mx.fast.cuda_kernel
    return _made(make, name, inputs, outputs, source, header)


def _made(
    make: Any, name: str, inputs: list[str], outputs: list[str], source: str, header: str
) -> Callable[..., Any]:
    # MLX tells kernels that it has compiled by their names, also those of another version of ours.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    made: Callable[..., Any] = make(
        name=f"{name}_{digest}",
        input_names=inputs,
        output_names=outputs,
        source=source,
        header=header,
    )
    return made
