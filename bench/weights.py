"""Weights and BLAS for the rivals of a measurement: the same arithmetic as this project's.

Uses mlx-lm alone to expand a model, so that nothing of ours decides what a rival runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CACHE = Path.home() / ".cache" / "mlx-troupe" / "bench"

EXPAND = """
import sys, json, mlx.core as mx
from pathlib import Path
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import load, save_model, save_config, dequantize_model
import shutil
source, target = Path(sys.argv[1]), Path(sys.argv[2])
model, tokenizer, config = load(str(source), return_config=True)
model = dequantize_model(model)
floating = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x
model.update(tree_map(floating, model.parameters()))
target.mkdir(parents=True)
save_model(target, model, donate_model=False)
config.pop("quantization", None); config.pop("quantization_config", None)
config["torch_dtype"] = "float32"
for path in source.iterdir():
    if path.suffix in (".json", ".jinja", ".model", ".txt") and "safetensors" not in path.name:
        shutil.copy(path, target / path.name)
save_config(config, config_path=target / "config.json")
"""


def expanded(model: Path) -> Path:
    """``model`` as float32, made once by mlx-lm."""
    target = CACHE / f"{model.name}-float32"
    if not (target / "config.json").exists():
        subprocess.run([sys.executable, "-c", EXPAND, str(model), str(target)], check=True)
    return target


def same_blas() -> dict[str, str]:
    """Environment that puts the BLAS which this project would use in front of a rival's MLX."""
    from mlx_troupe.runtime.engine.blas import ensure_fast_blas

    report = ensure_fast_blas()
    if report.kind == "openblas":
        core = {"OPENBLAS_CORETYPE": report.core} if report.core else {}
        return {"LD_PRELOAD": report.path, **core}
    if report.kind != "mkl":
        return {}
    folder = Path(report.path).parent
    layer = os.environ["MKL_THREADING_LAYER"]
    threads = [folder / "libtbb.so.12"] if layer == "TBB" else []
    return {
        "LD_PRELOAD": ":".join(map(str, [*threads, report.path])),
        "LD_LIBRARY_PATH": str(folder),
        "MKL_INTERFACE_LAYER": "LP64",
        "MKL_THREADING_LAYER": layer,
    }
