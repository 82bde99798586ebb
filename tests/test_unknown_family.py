"""A model of a family that mlx-lm lacks, or cannot import, is refused by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_checkpoint
from tokenizers import Tokenizer, models

from mlx_troupe.runtime.engine.models import load_checkpoint
from mlx_troupe.runtime.engine.tokenizer import load_tokenizer
from mlx_troupe.runtime.errors import ModelError

pytestmark = pytest.mark.mlx

SERVE = "from mlx_troupe.http.cli.main import main; main()"


def checkpoint(folder: Path, model_type: str) -> Path:
    """A whole model folder, tokenizer included, that says it is of this type."""
    make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("warp_drive", "not supported"),
        ("rope_utils", "no attribute 'Model'"),
        ("../../evil", "not supported"),
        ("", "not supported"),
    ],
)
def test_a_family_that_mlx_lm_lacks_is_refused_by_name(
    model_type: str, words: str, tmp_path: Path
) -> None:
    """Unknown names, names of mlx-lm's helpers and names that are none; before weights are read."""
    path = checkpoint(tmp_path, model_type)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError) as caught:
        load_checkpoint(path, "keep")
    assert f"model_type {model_type!r}" in caught.value.message
    assert words in caught.value.message
    assert caught.value.code == "model_type_unsupported"


def test_a_family_whose_file_ends_the_process_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm's olmo.py calls sys.exit while it is imported; neither loader lets that through."""
    monkeypatch.setitem(sys.modules, "hf_olmo", None)
    path = checkpoint(tmp_path, "olmo")
    with pytest.raises(ModelError, match="model_type 'olmo': needs a package"):
        load_checkpoint(path, "keep")
    with pytest.raises(ModelError, match="cannot run the model"):
        load_tokenizer(path)


def test_serve_refuses_an_unknown_family_in_one_line(tmp_path: Path) -> None:
    """The command ends with status 1 and names the type; there is no traceback to wade through."""
    path = checkpoint(tmp_path / "ship", "warp_drive")
    ended = subprocess.run(
        [sys.executable, "-c", SERVE, "serve", path, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    (told,) = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert "model_type 'warp_drive'" in told
    assert "Traceback" not in ended.stderr
