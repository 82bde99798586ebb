"""README and ARCHITECTURE keep up with the code: flags, request fields, files."""

from __future__ import annotations

import re
from pathlib import Path

from mlx_troupe.http.cli.serve import serve
from mlx_troupe.http.wire.chat import ChatRequest
from mlx_troupe.http.wire.completions import CompletionRequest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_the_readme_names_every_flag_of_serve() -> None:
    """By one of its names, or as one of its kind."""
    for option in serve.params:
        flags = [name for name in option.opts if name.startswith("--")]
        kinds = [re.sub(r"^(--ssd-).*", r"\1…", name) for name in flags]
        assert not flags or any(name in README for name in (*flags, *kinds)), flags


def test_the_readme_names_every_field_of_a_request() -> None:
    """Whoever reads it need not guess what there is."""
    for field in {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}:
        assert re.search(rf"\b{field}\b", README) or field.endswith("_context_size"), field


def test_the_architecture_speaks_of_files_that_exist() -> None:
    """Every file that its text names is there, or the end of its path is."""
    folders = ("runtime", "actors", "http", "tests", "bench")
    files = [path.as_posix() for name in folders for path in (ROOT / name).rglob("*.py")]
    for named in set(re.findall(r"`([\w/]+\.py)`", ARCHITECTURE.partition("## The tree")[0])):
        assert any(path.endswith(f"/{named}") for path in files), named
