"""The package's source as the house reads it: its modules, and the names that each of them imports."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "weaveopt": ROOT / "weaveopt",
    "weaveopt.rewrites": ROOT / "rewrites",
    "weaveopt.cost_model": ROOT / "cost_model",
}
"""Folder of each package; the two within the first one may be links in there."""


def python_files() -> dict[str, Path]:
    """Import name -> file, for every Python file of the package."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package == "weaveopt" and parts[0] in ("rewrites", "cost_model"):
                continue
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


FILES = python_files()


def imports_of(path: Path, *, for_types: bool = True) -> set[str]:
    """Every dotted name that a file imports anywhere in it, lazily or not; `for_types`: for type checkers too.

    `from weaveopt import rule` counts as `weaveopt.rule`; `from weaveopt.rule import Rule` as `weaveopt.rule.Rule`.
    """
    tree = ast.parse(path.read_text())
    left_out: set[ast.AST] = set()
    for node in () if for_types else ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left_out.update(ast.walk(node))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room(module: str) -> str:
    """The room, or the single file, that a module of weaveopt is in; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]
