"""Import every module of the installed package and prove that none comes from a checkout.

Run by ``.ci/run`` with the interpreter of a fresh environment; the argument is the checkout.
"""

from __future__ import annotations

import http
import importlib
import sys
from pathlib import Path


def modules(root: Path) -> list[str]:
    """Dotted names of all product modules, read off the checkout's files."""
    names = []
    for folder in ("runtime", "actors", "http"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            names.append(".".join(("mlx_troupe", *(p for p in parts if p != "__init__"))))
    return names


def main() -> int:
    """Exit status 0 when all imports work and come from site-packages."""
    root = Path(sys.argv[1]).resolve()
    from mlx_troupe.runtime.engine.blas import ensure_fast_blas

    ensure_fast_blas()
    for name in modules(root):
        module = importlib.import_module(name)
        where = Path(module.__file__ or module.__path__[0]).resolve()
        if root in where.parents:
            print(f"{name} was imported from the checkout: {where}")
            return 1
    if root in Path(http.__file__).resolve().parents:
        print(f"the standard library's http is hidden by {http.__file__}")
        return 1
    print("all modules import")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
