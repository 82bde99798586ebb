"""Run the prompts of the goldens through our own device, as one lone row after another.

    python goldens/replay.py --model DIR --out FILE

Writes ``{"blas": …, "float32": […], "int4": […]}`` with the ids and logits digests of every prompt
in the shape that ``regenerate.py`` gives them. The device is driven as the product drives it: one
step running and one queued. A process of its own, so that BLAS, MLX and threads are set up afresh,
just as in the oracle's.

The logits never leave the device; they are caught where the model returns them, by wrapping the
model class's ``__call__``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_troupe.runtime.engine.blas import ensure_fast_blas
from mlx_troupe.runtime.plans import Cold, PrefillRow, RowId, StartRow, StepId, StepPlan
from mlx_troupe.runtime.requests import Sampling
from mlx_troupe.runtime.settings import Dtype

HERE = Path(__file__).resolve().parent
DTYPES: dict[str, Dtype] = {"float32": "float32", "int4": "keep"}
ROW = RowId(1)


def main() -> int:
    """Run both precisions; exit status 0 only if all went well."""
    parser = argparse.ArgumentParser(description="Run the goldens' prompts on our device.")
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"blas": asdict(ensure_fast_blas())}
    with TemporaryDirectory() as folder:
        widen_vectors(arguments.model, Path(folder))
        for precision, dtype in DTYPES.items():
            result[precision] = replay(Path(folder), precision, dtype)
    arguments.out.write_text(json.dumps(result))
    return 0


def widen_vectors(model_path: Path, folder: Path) -> None:
    """Copy a model with its vectors of halves as float32; ``regenerate.py`` says why."""
    import mlx.core as mx

    shutil.copy(model_path / "config.json", folder)
    for file in model_path.glob("*.safetensors"):
        tensors: Any = mx.load(str(file))
        for name, tensor in tensors.items():
            if tensor.ndim == 1 and tensor.dtype == mx.float16:
                tensors[name] = tensor.astype(mx.float32)
        mx.save_safetensors(str(folder / file.name), tensors, metadata={"format": "mlx"})


def replay(model_path: Path, precision: str, dtype: Dtype) -> list[dict[str, Any]]:
    """All prompts of one precision."""
    from mlx_troupe.runtime.engine.executor import MLXDevice
    from mlx_troupe.runtime.engine.opening import Options

    prompts = json.loads((HERE / "prompts.json").read_text())
    seen = catch_logits()
    device = MLXDevice(Options(model_path, name="starter", dtype=dtype))
    device.open()
    wanted = [prompt for prompt in prompts if precision in prompt["precisions"]]
    done = [run(device, prompt, seen) for prompt in wanted]
    device.close()
    return done


def catch_logits() -> list[Any]:
    """Let the starter's model class append whatever it returns to the list returned here."""
    from mlx_lm.models.llama import Model

    seen: list[Any] = []
    call: Callable[..., Any] = Model.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(call(self, *args, **kwargs))
        return seen[-1]

    Model.__call__ = watched
    return seen


def run(device: Any, prompt: dict[str, Any], seen: list[Any]) -> dict[str, Any]:
    """One prompt: start, prefill and first decode in one step, then a step for each token."""
    ids = tuple(prompt["ids"])
    prefill = (PrefillRow(ROW, len(ids) - 1),) if len(ids) > 1 else ()
    start = (StartRow(ROW, ids, Sampling(), Cold()),)
    device.launch(StepPlan(StepId(0), start=start, prefill=prefill, decode=(ROW,)))
    device.push()
    outputs = [seen[-1]]
    tokens: list[int] = []
    for step in range(1, prompt["new"]):
        device.launch(StepPlan(StepId(step), decode=(ROW,)))
        device.push()
        outputs.append(seen[-1])
        tokens.append(settle(device))
    tokens.append(settle(device))
    device.launch(StepPlan(StepId(prompt["new"]), end=(ROW,)))
    device.push()
    device.settle()
    seen.clear()
    digests = [digest(output) for output in outputs]
    return {"name": prompt["name"], "ids": tokens, "digests": digests}


def settle(device: Any) -> int:
    """The one token of the oldest step. Raises RuntimeError if the row failed."""
    done = device.settle()
    if done.failed:
        raise RuntimeError(done.failed[0].reason)
    (sampled,) = done.sampled
    return int(sampled.token)


def digest(output: Any) -> str:
    """SHA-256 of the last position's logits as float32."""
    import mlx.core as mx
    import numpy as np

    return hashlib.sha256(np.asarray(output[0, -1].astype(mx.float32)).tobytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
