"""Make goldens: what mlx-lm alone computes for the starter on this machine.

    python goldens/regenerate.py                 a set for this machine, in goldens/<its key>/
    python goldens/regenerate.py --out DIR       the same elsewhere
    python goldens/regenerate.py --model DIR     from a model directory that is here already

**What is in a set.** For each precision (``int4``: the weights as shipped; ``float32``: expanded by
mlx-lm's ``dequantize_model`` and cast) and each prompt of ``prompts.json``, 25 greedy ids from
``mlx_lm.generate.generate_step`` and, for each of them, the logits that it was picked from: the
SHA-256 digest of all 49,152 values (float32, little-endian) and, for people and machines that
cannot expect equal bits, 64 fixed columns and the maximum (base64 of 65 float32). Prompts are
token ids, so no tokenizer takes part. 100 ids and 100 vectors in each precision. ``manifest.json``
names versions, hashes of the model and of the files beside it, and the key.

``int4`` is the GGUF's own mixture: 4-bit matrices and float32 norms. A directory that holds its
norms as halves (the same values) has them widened first, on both sides: with halves every
activation is a half, and MLX's quantized product of halves takes 5 s a token on a CPU, not 0.2.

**Whose numbers they are.** The model, its caches, the loop and the choice of tokens are mlx-lm's.
Of mlx_troupe this script imports what puts a fast BLAS in front of MLX, since the goldens must be
made under the product's BLAS, and, without ``--model``, what finds the starter's files. The
manifest lists every module of ours that was loaded, and the test reads that list.

**Keys.** The same model has other bits under another build of MLX, of mlx-lm, BLAS, another core
type, thread count, C library (its ``expf`` and ``cosf``), compiler (MLX compiles fused kernels with
it on the spot, and does without where there is none) or device. All of these make up the key.

**How they are used** (``tests/test_goldens.py``). Everywhere, a set is made afresh with this script
and our device (``replay.py``) must agree with it bit by bit. Where the machine's key is that of a
committed set, the fresh set must equal that one, too. On an unknown key the committed sets must
still agree in every id, and in logits within 1e-3, and the run says so. Nothing is ever skipped.

A committed set changes only by this script and with the reason in the commit.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_troupe.runtime.engine.blas import BlasReport, ensure_fast_blas

HERE = Path(__file__).resolve().parent
PRECISIONS = ("float32", "int4")
COLUMNS = range(0, 49_152, 768)
"""Vocabulary columns whose logits are kept as numbers."""


def main() -> int:
    """Make one set; exit status 0 only if it is whole."""
    parser = argparse.ArgumentParser(description="Make goldens with mlx-lm alone.")
    parser.add_argument("--out", type=Path, help="folder to write (default: one named by the key)")
    parser.add_argument("--model", type=Path, help="model directory (default: the starter)")
    arguments = parser.parse_args()
    blas = ensure_fast_blas()
    model_path = arguments.model or find_starter()
    key = machine_key(blas)
    folder = arguments.out or HERE / slug(key)
    folder.mkdir(parents=True, exist_ok=True)
    for precision in PRECISIONS:
        write_json(folder / f"{precision}.json", make_set(model_path, precision))
    write_json(folder / "manifest.json", manifest(model_path, key, blas, folder))
    sys.stdout.write(f"{folder}\n")
    return 0


def find_starter() -> Path:
    """The starter's directory, fetched if it is not here."""
    from mlx_troupe.runtime.store.starter import ensure_starter

    return Path(ensure_starter())


def make_set(model_path: Path, precision: str) -> dict[str, Any]:
    """Greedy ids and logits of all prompts in one precision."""
    model = load(model_path, precision)
    prompts = json.loads((HERE / "prompts.json").read_text())
    wanted = [prompt for prompt in prompts if precision in prompt["precisions"]]
    return {
        "precision": precision,
        "columns": list(COLUMNS),
        "prompts": [run(model, prompt) for prompt in wanted],
    }


def load(model_path: Path, precision: str) -> Any:
    """The model as mlx-lm loads it; for ``float32`` with all weights expanded."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import dequantize_model, load_model

    model, _ = load_model(model_path)
    if precision == "float32":
        model = dequantize_model(model)
        model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    else:
        model.update(tree_map(widened, model.parameters()))
    mx.eval(model.parameters())
    return model


def widened(weight: Any) -> Any:
    """A vector of halves as float32, which is how GGUF has it; anything else as it is."""
    import mlx.core as mx

    halves = weight.ndim == 1 and weight.dtype == mx.float16
    return weight.astype(mx.float32) if halves else weight


def run(model: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """One prompt: ``new`` greedy ids and what they were picked from."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.generate import generate_step

    seen: list[Any] = []

    def watch(_: mx.array, logits: mx.array) -> mx.array:
        seen.append(logits)
        return logits

    steps = generate_step(
        mx.array(prompt["ids"]), model, max_tokens=prompt["new"], logits_processors=[watch]
    )
    ids = [token for token, _ in steps]
    # generate_step computes one vector more than it yields tokens.
    vectors = [np.asarray(logits[0].astype(mx.float32)) for logits in seen[: len(ids)]]
    return {
        "name": prompt["name"],
        "ids": ids,
        "digests": [hashlib.sha256(vector.tobytes()).hexdigest() for vector in vectors],
        "samples": [sample(vector) for vector in vectors],
    }


def sample(vector: Any) -> str:
    """The kept columns and the maximum, float32, as base64."""
    import numpy as np

    values = np.append(vector[COLUMNS.start : COLUMNS.stop : COLUMNS.step], vector.max())
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def machine_key(blas: BlasReport) -> dict[str, str]:
    """All that decides the bits of a result, apart from the model."""
    import mlx.core as mx

    device = "cpu" if mx.default_device() == mx.cpu else mx.device_info()["device_name"]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "mlx": ", ".join(f"{name} {version}" for name, version in mlx_builds().items()),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "blas": f"{blas.kind} {blas.version}".strip(),
        "core": blas.core,
        "threads": str(blas.threads),
        "libc": " ".join(platform.libc_ver()).strip(),
        "compiler": compiler(),
    }


def mlx_builds() -> dict[str, str]:
    """Installed distributions of MLX and its backends, from their metadata."""
    names = sorted(
        name
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"]) == "mlx"
        or name.startswith(("mlx-cpu", "mlx-cuda", "mlx-metal"))
    )
    return {name: importlib.metadata.version(name) for name in names}


def compiler() -> str:
    """The compiler that MLX uses for fused kernels on a Linux CPU; "none" if there is none."""
    path = shutil.which("g++")
    if path is None:
        return "none"
    command = [path, "-dumpfullversion", "-dumpversion"]
    return (
        "g++ " + subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


def slug(key: dict[str, str]) -> str:
    """A folder name for a key: readable in front, unique at the end."""
    front = [key["device"], key["blas"].split()[0], key["core"], f"{key['threads']}t"]
    words = "-".join(part for part in front if part).lower().replace(" ", "-")
    return f"{words}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]}"


def manifest(
    model_path: Path, key: dict[str, str], blas: BlasReport, folder: Path
) -> dict[str, Any]:
    """What the set was made of, with and from."""
    files = sorted((*model_path.glob("*.safetensors"), model_path / "config.json"))
    return {
        "key": key,
        "slug": slug(key),
        "versions": {
            "python": platform.python_version(),
            "mlx-lm": importlib.metadata.version("mlx-lm"),
            "numpy": importlib.metadata.version("numpy"),
            **mlx_builds(),
        },
        "blas": asdict(blas),
        "weights_sha256": weights_digest(model_path),
        "model_files": {file.name: file_digest(file) for file in files},
        "prompts_sha256": file_digest(HERE / "prompts.json"),
        "sets": {name: file_digest(folder / f"{name}.json") for name in PRECISIONS},
        "imported_of_ours": sorted(n for n in sys.modules if n.partition(".")[0] == "mlx_troupe"),
    }


def weights_digest(model_path: Path) -> str:
    """Digest of all tensors by name, whatever order a writer put them into the files."""
    import mlx.core as mx
    import numpy as np

    digest = hashlib.sha256()
    tensors: dict[str, Any] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        loaded: Any = mx.load(str(file))
        tensors.update(loaded)
    for name, tensor in sorted(tensors.items()):
        shipped = widened(tensor)
        digest.update(f"{name} {shipped.dtype} {shipped.shape}\n".encode())
        digest.update(np.asarray(shipped.view(mx.uint8)).tobytes())
    return digest.hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Readable and stable, so that a change shows in a diff."""
    file.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
