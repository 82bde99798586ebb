"""The project's own rules, read off its files: layers, layout, packaging, size.

Runs no product code. A rule that is broken names the file and the line that broke it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "actors", "http")
MAY_IMPORT = {
    "runtime": {"runtime"},
    "actors": {"runtime", "actors"},
    "http": {"runtime", "actors", "http"},
}
FORBIDDEN_LIBRARIES = {
    "runtime": {"trio", "quart", "quart_trio", "hypercorn", "anyio", "asyncio", "pytest_trio"},
    "actors": {"quart", "quart_trio", "hypercorn", "asyncio"},
    "http": {"asyncio"},
}
TOP_LEVEL_FOLDERS = {"runtime", "actors", "http", "tests", "bench", "goldens", ".ci"}
TOP_LEVEL_FILES = {
    ".gitignore",
    "ARCHITECTURE.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module by its absolute dotted name, and where."""

    name: str
    where: str


def product_files() -> list[Path]:
    """All Python files of the three folders, relative to the root."""
    return [p.relative_to(ROOT) for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py"))]


def package_of(path: Path) -> list[str]:
    """Parts of the package that holds a file: what a relative import of level 1 starts from."""
    return ["mlx_troupe", *path.parent.parts]


def imports_of(path: Path, source: str) -> list[Import]:
    """Every import statement and every ``import_module("literal")``, at any depth."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(level=0, module=str(module)):
                # ``from mlx_troupe import http`` names the layer only in its second half.
                names = [f"{module}.{alias.name}" for alias in node.names]
            case ast.ImportFrom():
                base = package_of(path)[: len(package_of(path)) - node.level + 1]
                stem = [*base, *([node.module] if node.module else [])]
                names = [".".join([*stem, alias.name]) for alias in node.names]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [name]
        line = getattr(node, "lineno", 0)
        found += [Import(name, f"{path}:{line}") for name in names]
    return found


def all_imports() -> list[tuple[Path, Import]]:
    """(file, import) for the whole product."""
    return [
        (path, found)
        for path in product_files()
        for found in imports_of(path, (ROOT / path).read_text(encoding="utf-8"))
    ]


def pyproject() -> dict:
    """pyproject.toml as a value."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_import_reader_resolves_every_spelling() -> None:
    """Relative, absolute, nested and dynamic imports are seen under their absolute names."""
    source = (
        "import mlx.core as mx\n"
        "from ..runtime.errors import TroupeError\n"
        "from . import messages\n"
        "def f():\n"
        "    from mlx_troupe import http\n"
        "    importlib.import_module('quart')\n"
    )
    names = {found.name for found in imports_of(Path("actors/x.py"), source)}
    assert names == {
        "mlx.core",
        "mlx_troupe.runtime.errors.TroupeError",
        "mlx_troupe.actors.messages",
        "mlx_troupe.http",
        "quart",
    }


def test_layers_import_downwards_only() -> None:
    """http → actors → runtime, never back, also not in a function or for types alone."""
    wrong = []
    for path, found in all_imports():
        parts = found.name.split(".")
        if parts[0] == "mlx_troupe" and parts[1] not in MAY_IMPORT[path.parts[0]]:
            wrong.append(f"{found.where} imports {found.name}")
    assert not wrong, "\n".join(wrong)


def test_each_layer_stays_away_from_the_libraries_of_those_above() -> None:
    """The runtime knows no event loop, the actors no HTTP framework, nobody asyncio."""
    wrong = [
        f"{found.where} imports {found.name}"
        for path, found in all_imports()
        if found.name.split(".")[0] in FORBIDDEN_LIBRARIES[path.parts[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_mlx_is_imported_under_the_engine_only() -> None:
    """``mlx`` and ``mlx_lm`` are named nowhere outside ``runtime/engine``."""
    wrong = [
        f"{found.where} imports {found.name}"
        for path, found in all_imports()
        if found.name.split(".")[0] in {"mlx", "mlx_lm"} and path.parts[:2] != ("runtime", "engine")
    ]
    assert not wrong, "\n".join(wrong)


def test_imported_libraries_are_declared() -> None:
    """Whatever the product imports is a dependency of its own, not of a dependency."""
    declared = {
        re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        for requirement in pyproject()["project"]["dependencies"]
    }
    distributions = importlib.metadata.packages_distributions()
    wrong = []
    for _, found in all_imports():
        top = found.name.split(".")[0]
        if top in sys.stdlib_module_names or top == "mlx_troupe":
            continue
        owners = {name.lower().replace("_", "-") for name in distributions.get(top, [])}
        if not owners & declared:
            wrong.append(f"{found.where} imports {top}, which pyproject.toml does not name")
    assert not wrong, "\n".join(wrong)


def test_the_folder_http_never_hides_the_standard_library() -> None:
    """Without http/__init__.py the standard library's package wins even from the root."""
    assert not (ROOT / "http" / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    program = "import http, http.client; print(http.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ROOT not in Path(done.stdout.strip()).parents


def test_every_package_on_disk_is_shipped() -> None:
    """pyproject.toml lists exactly the folders that hold product modules."""
    on_disk = {".".join(package_of(path)) for path in product_files()}
    listed = set(pyproject()["tool"]["setuptools"]["packages"])
    assert listed == on_disk


def test_packages_have_an_init_file_except_http() -> None:
    """A folder without one is a namespace package by accident."""
    wrong = [
        str(folder)
        for folder in {path.parent for path in product_files()}
        if folder != Path("http") and not (ROOT / folder / "__init__.py").exists()
    ]
    assert not wrong, "\n".join(wrong)


def top_level() -> set[str]:
    """Names at the top that git tracks or would track; without git, whatever is not hidden."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.split("/")[0] for line in done.stdout.splitlines()}


def test_the_top_level_holds_the_agreed_names_only() -> None:
    """New folders at the top are a decision, not an accident."""
    assert top_level() <= TOP_LEVEL_FOLDERS | TOP_LEVEL_FILES


def test_modules_say_what_they_are() -> None:
    """Every module that holds code opens with a docstring."""
    wrong = []
    for path in product_files():
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            wrong.append(str(path))
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_fit_a_reader() -> None:
    """No file over 400 lines, no function over 80."""
    wrong = []
    for path in product_files():
        source = (ROOT / path).read_text(encoding="utf-8")
        if source.count("\n") > MAX_FILE_LINES:
            wrong.append(f"{path}: {source.count(chr(10))} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    wrong.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_unfinished() -> None:
    """No markers of work to come in what is shipped."""
    wrong = [
        f"{path}:{number} {line.strip()}"
        for path in product_files()
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("script", [".ci/run", ".ci/setup.sh", ".ci/mypy.sh"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    """A script with a syntax error would be found only by whoever clones."""
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_the_architecture_names_every_file_and_no_other() -> None:
    """ARCHITECTURE.md's tree is true: each line names a file and begins its docstring."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = text.split("```")[-2].strip().splitlines()
    told = dict(line.split(maxsplit=1) for line in tree)
    files = {
        path.relative_to(ROOT).as_posix(): path
        for folder in ("runtime", "actors", "http")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert set(told) == set(files)
    for name, line in told.items():
        doc = ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) or ""
        assert doc.splitlines()[0].startswith(line.rstrip(".")), name
