"""Writes the tree at the end of ARCHITECTURE.md anew: `python .ci/tree.py` in the root."""

import ast
from pathlib import Path

page = Path("ARCHITECTURE.md")
lines = []
for folder in ("runtime", "actors", "http"):
    for path in sorted(Path(folder).rglob("*.py")):
        if path.name != "__init__.py":
            doc = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
            lines.append(f"{path.as_posix():40s} {doc.rstrip('.')}")
before, _, after = page.read_text("utf-8").rpartition("```\n")
head, _, _ = before.rpartition("```\n")
page.write_text(f"{head}```\n" + "\n".join(lines) + f"\n```\n{after}", "utf-8")
