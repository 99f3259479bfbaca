"""The house: imports lead downwards only, and nothing outside a rule's own rooms names the rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "records"),
    ("config", "cost_model"),
    ("graph", "solver"),
    ("fabrics",),
    ("rule",),
    ("sites", "inductor", "ops"),
    ("rewrites",),
    ("pipeline",),
    ("reporting", "measure"),
    ("backend",),
    ("cli",),
)
"""Rooms and single files of the package, from the lowest up. A room imports rooms of lower layers only."""
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
FOLDERS = {"weaveopt": ROOT / "weaveopt", "rewrites": ROOT / "rewrites", "cost_model": ROOT / "cost_model"}

FAMILIES = {
    "all_reduce_rms_norm": re.compile(r"all_reduce_(rms_)?norm|AllReduce(RMS)?Norm", re.IGNORECASE),
}
"""Each rule, and every name of it and of its operations."""
ROOMS = {
    "all_reduce_rms_norm": (
        "rewrites/all_reduce_rms_norm/",
        "weaveopt/ops/all_reduce_norm/",
        "weaveopt/measure/cases/all_reduce_norm/",
        "csrc/all_reduce_norm/",
    ),
}
REGISTRIES = (
    "rewrites/__init__.py",
    "weaveopt/ops/__init__.py",
    "weaveopt/measure/cases/__init__.py",
    "csrc/base/families.cpp",
    "weaveopt/_native.pyi",
)
"""Where a rule, an operation family, its measurements and its kernels each have their line; and the types of all that
the native module holds."""


def modules() -> Iterator[tuple[str, Path]]:
    """(name in the package, file) of every module."""
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            if folder == ROOT / "weaveopt" and path.is_relative_to(folder / "rewrites"):
                continue
            if folder == ROOT / "weaveopt" and path.is_relative_to(folder / "cost_model"):
                continue
            words = path.relative_to(folder).with_suffix("").parts
            inner = (package, *words) if package != "weaveopt" else words
            yield ".".join(word for word in inner if word != "__init__"), path


def imports_of(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports, as names in the package; imports for type checkers left out."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("weaveopt.") for name in names if name.startswith("weaveopt."))


def test_every_room_has_a_layer() -> None:
    rooms = {name.split(".")[0] for name, _ in modules() if name}
    assert rooms - LAYER_OF.keys() - {"presets"} == set()


@pytest.mark.parametrize(
    ("name", "path"), [pytest.param(name, path, id=name or "weaveopt") for name, path in modules()]
)
def test_imports_lead_downwards(name: str, path: Path) -> None:
    room = name.split(".")[0]
    if room not in LAYER_OF:
        return
    wrong = [
        imported
        for imported in imports_of(path)
        if (other := imported.split(".")[0]) in LAYER_OF and other != room and LAYER_OF[other] >= LAYER_OF[room]
    ]
    assert not wrong, f"{name} is in layer {LAYER_OF[room]} and imports {wrong}"


def sources() -> Iterator[str]:
    for folder in ("weaveopt", "rewrites", "cost_model", "csrc"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".pyi", ".h", ".cuh", ".cu", ".cpp", ".inc") and not path.is_symlink():
                yield str(path.relative_to(ROOT))


@pytest.mark.parametrize("rule", FAMILIES)
def test_nothing_outside_its_rooms_names_a_rule(rule: str) -> None:
    found = []
    for name in sources():
        if name.startswith(ROOMS[rule]) or name in REGISTRIES:
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1):
            if FAMILIES[rule].search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "\n".join(found)
