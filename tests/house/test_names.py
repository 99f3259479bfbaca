"""Names: a class name has one meaning in the product."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.house.source import FILES


def classes_by_name(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Modules that define each class name, nested classes included."""
    found = defaultdict(list)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return dict(found)


def ambiguous(classes: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{name}: {', '.join(modules)}" for name, modules in sorted(classes.items()) if len(modules) > 1]


def test_a_class_name_has_one_meaning() -> None:
    """Name a class by its family or rule where the plain word is taken: `ReductionPlan`, `RowTraffic`."""
    classes = classes_by_name({module: path.read_text() for module, path in FILES.items()})
    assert len(classes) > 500, "the walk misses some"
    assert not ambiguous(classes), "\n".join(("defined in several modules:", *ambiguous(classes)))


def test_second_definitions_are_found() -> None:
    two = {"a": "class Plan: ...\nclass Other:\n    class Step: ...\n", "b": "def f():\n    class Step: ...\n"}
    assert ambiguous(classes_by_name(two)) == ["Step: a, b"]
    assert not ambiguous(classes_by_name({"a": two["a"]}))
