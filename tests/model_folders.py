"""Makes folders that look like models on disk, whole or damaged, without MLX."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def make_model(folder: Path, *, shards: int = 1, model_type: str = "llama") -> Path:
    """A whole model: config, tokenizer, and weights in one file or in indexed shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    if shards == 1:
        save_file({"a": np.zeros(8, np.float32)}, folder / "model.safetensors")
        return folder
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    for index, name in enumerate(names):
        save_file({f"w{index}": np.zeros(8, np.float32)}, folder / name)
    weight_map = {f"w{index}": name for index, name in enumerate(names)}
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    """The index of shards."""
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def make_hub_model(
    hub: Path, repo_id: str, revision: str = "a" * 40, *, main: str | None = None, shards: int = 1
) -> Path:
    """A repository as the hub's tools keep it: blobs, links to them, and refs/main.

    ``main`` is what refs/main names; None = this revision. Returns the snapshot.
    """
    repository = hub / f"models--{repo_id.replace('/', '--')}"
    snapshot = make_model(repository / "snapshots" / revision, shards=shards)
    blobs = repository / "blobs"
    blobs.mkdir(exist_ok=True)
    for path in list(snapshot.iterdir()):
        blob = blobs / f"{revision[:6]}-{path.name}"
        path.rename(blob)
        path.symlink_to(Path("..") / ".." / "blobs" / blob.name)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(main or revision)
    return snapshot


def drop_blob(snapshot: Path, name: str) -> None:
    """Delete what a snapshot's link points to, so that it dangles."""
    (snapshot / name).resolve().unlink()
