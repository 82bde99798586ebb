"""Everything that touches MLX. Importing this package imports no MLX: `blas` must run before it."""
