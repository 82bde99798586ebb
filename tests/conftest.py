"""Puts a fast BLAS in front of MLX's before any test module imports it."""

from mlx_troupe.runtime.engine.blas import ensure_fast_blas

ensure_fast_blas()
