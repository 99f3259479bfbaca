"""Docstrings: the first line says what a thing is or does, and is no fragment that only its code completes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from tests.house.source import ROOT

FOLDERS = ("weaveopt", "rewrites", "cost_model", "tests", "benchmarks", "examples", "distribution")
FRAGMENTS = frozenset({"of", "that", "where", "else", "by", "behind", "beside", "whether", "what"})
"""First words of docstrings that depend on the code below: `Of the sum.`, `Whether it is read.`"""
Docstrings = Iterator[tuple[int, str]]
"""Line and text of each docstring."""
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed() -> Mapping[Path, ast.Module]:
    """Every Python file of the repository."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in (ROOT / "setup.py", *files)}


def docstrings(tree: ast.Module) -> Docstrings:
    """Line and text of the docstring of the module and of every class and function, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node) is not None:
            yield from _literal(node.body[0])


def attribute_docstrings(tree: ast.Module) -> Docstrings:
    """Line and text of every string that follows an assignment: of module, class and instance attributes."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, Documented) else []
        for before, after in pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign):
                yield from _literal(after)


def _literal(statement: ast.stmt) -> Docstrings:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            yield statement.lineno, text


def is_fragment(text: str) -> bool:
    """True if the first word is one of `FRAGMENTS`."""
    first = re.match(r"\s*([A-Za-z]+)\b", text)
    return first is not None and first[1].lower() in FRAGMENTS


def fragments(read: Callable[[ast.Module], Docstrings]) -> tuple[int, list[str]]:
    """Number of docstrings that `read` finds in the repository, and those that are fragments, with file and line."""
    seen = [(path, *each) for path, tree in parsed().items() for each in read(tree)]
    found = [(path, line, text.strip().splitlines()[0]) for path, line, text in seen if is_fragment(text)]
    return len(seen), [f"{path.relative_to(ROOT)}:{line}: {first}" for path, line, first in found]


@pytest.mark.parametrize(("read", "least"), [(docstrings, 3000), (attribute_docstrings, 1000)])
def test_no_docstring_begins_with_a_fragment(read: Callable[[ast.Module], Docstrings], least: int) -> None:
    """Fewer than `least` mean that the walk misses some: there are about 4,500 and 1,500."""
    count, found = fragments(read)
    print(f"looked at {count} docstrings")
    assert not found, "\n".join((f"{len(found)} of {count} begin with one of {sorted(FRAGMENTS)}:", *found))
    assert count >= least, f"looked at {count} docstrings, expected {least} or more"


def test_fragments_are_recognized() -> None:
    tree = ast.parse('''"""Of the module."""
x: int = 1
"""By name."""
class A:
    """Whether
    it is one."""
    async def run(self) -> None:
        """ what it does."""
        self.y = 2
        """Where it is."""
        "By itself"
        def inner() -> None:
            """Offers, thatched or whatever."""
''')
    assert [(line, is_fragment(text)) for line, text in sorted(docstrings(tree))] == [
        (1, True), (5, True), (8, True), (13, False),
    ]  # fmt: skip
    assert [(line, is_fragment(text)) for line, text in sorted(attribute_docstrings(tree))] == [(3, True), (10, True)]
    assert all(is_fragment(f"{word.capitalize()}: it.") for word in FRAGMENTS)
    assert not any(
        map(is_fragment, ("", "True if so.", "`by` is a word.", "(rows, columns)", "Offset.", "[n] of all."))
    )
