"""Prose: a docstring's first line names what a thing is or does, and sentences use the field's terms.

Two deny-lists: first words of docstrings that only the code completes, and everyday words with a technical meaning in
docstrings, comments, messages and documentation pages.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
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

SENTENCES = ("weaveopt", "rewrites", "cost_model")
"""Folders whose Python sentences are searched for `DIALECT`; not those of tests and benchmarks."""
NATIVE = ("csrc",)
PAGES = ("docs", "README.md", "CONTRIBUTING.md")
DIALECT: Mapping[str, str] = {
    r"(?<!lag )\bbehind\s+(the|a|an|its?|them|each|this|that|those|these|all|every|which|what|another)\b":
        "after, downstream of",
    r"\bbeside\b": "concurrent with, next to, in addition to",
    r"\b(lies?|lay|lying)\b": "is stored, resides, is",
    r"\b(tells?|telling|told)\b": "signals, reports, distinguishes",
    r"\bhand(s|ed|ing)?\s+(it|them|rows|on|out|over|to|its|their)\b": "returns, passes, sends",
    r"\b(at|come|comes|came|go|goes|went|sent)\s+home\b|\bhomes\b": "at the owner, returned, buffers",
    r"\b(meets?|met|meetings?)\b": "synchronize, rendezvous, are added",
    r"\bon\s+(the|its|their)\s+way\b|\bunder\s+way\b": "in flight, in between",
    r"\bknows?\s+(no|of|only)\b": "supports, depends on",
    r"\bthe\s+kernels?\s+takes?\s+(bf16|bfloat16|at most|up to|head|rows of)\b": "supports, accepts",
    r"\b(take|taken|tell|told|stays?|kept|keeps|measured)\s+apart\b": "decomposed, separate",
    r"\bforeign\b": "remote",
    r"\bfinishers?\b": "reducer",
}  # fmt: skip
"""Everyday words with a technical meaning, and the field's terms for them."""


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


def python_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of comments, consecutive ones joined, and of string literals with blanks: docstrings, messages."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield begin, "\n".join(block)
                block = []
            begin, last = (begin if block else token.start[0]), token.start[0]
            block.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and " " in token.string:
            yield token.start[0], token.string
    if block:
        yield begin, "\n".join(block)


def native_sentences(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a file, as one text with its lines, and each string literal with blanks."""
    comments = [re.search(r"//+(.*)", line) for line in source.splitlines()]
    yield 1, "\n".join("" if found is None else found[1] for found in comments)
    for number, line in enumerate(source.splitlines(), 1):
        for literal in re.findall(r'"([^"]* [^"]*)"', line.partition("//")[0]):
            yield number, literal


def page_sentences(source: str) -> Iterator[tuple[int, str]]:
    """The page as one text, without fenced code."""
    yield 1, re.sub(r"^```.*?^```", lambda code: "\n" * code[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)


def dialect_in(text: str) -> Iterator[tuple[int, str]]:
    """Line within the text and wording of each phrase of `DIALECT`, with the term to use."""
    for pattern, term in DIALECT.items():
        for found in re.finditer(pattern, text):
            yield text.count("\n", 0, found.start()), f"{' '.join(found[0].split())!r}: say {term}"


def files_of(folders: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """Files of those folders, or the files themselves, with one of the suffixes."""
    roots = [ROOT / folder for folder in folders]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    return sorted(path for path in paths if path.suffix in suffixes)


@pytest.mark.parametrize(
    ("read", "folders", "suffixes", "least"),
    [
        (python_sentences, SENTENCES, (".py", ".pyi"), 5000),
        (native_sentences, NATIVE, (".h", ".cpp", ".inc", ".cu", ".cuh"), 400),
        (page_sentences, PAGES, (".md",), 20),
    ],
    ids=["python", "native", "pages"],
)
def test_sentences_use_the_terms_of_the_field(
    read: Callable[[str], Iterator[tuple[int, str]]], folders: Sequence[str], suffixes: Sequence[str], least: int
) -> None:
    """Fewer texts than `least` mean that the walk misses some."""
    texts = [(path, *each) for path in files_of(folders, suffixes) for each in read(path.read_text())]
    found = [
        f"{path.relative_to(ROOT)}:{line + offset}: {what}"
        for path, line, text in texts
        for offset, what in dialect_in(text)
    ]
    print(f"looked at {len(texts)} texts")
    assert not found, "\n".join((f"{len(found)} phrases in {len(texts)} texts:", *found))
    assert len(texts) >= least, f"looked at {len(texts)} texts, expected {least} or more"


def test_dialect_is_recognized() -> None:
    examples = (
        "rows behind the\n  gather", "its event beside another", "it lies there", "a peer is told", "hands rows out",
        "results come home", "ranks meet", "while on its way", "bytes are under\nway", "the kernel knows no windows",
        "it stays apart", "foreign choices", "a finisher",
        "the kernel takes bf16",
    )  # fmt: skip
    assert len(examples) >= len(DIALECT)
    for pattern in DIALECT:
        assert any(re.search(pattern, example) for example in examples), f"no example of {pattern}"
    assert all([*dialect_in(example)] for example in examples)
    plain = (
        "nothing is left behind", "a fixed lag behind the last one", "written by hand", "hand-written", "relies on it",
        "applied", "metadata", "the home directory", "by far", "delayed", "the way it is computed",
    )  # fmt: skip
    assert not [word for text in plain for word in dialect_in(text)]


def test_sentences_are_found_in_each_kind_of_file() -> None:
    python = 'x = 1  # it\n# lies\ndef f():\n    """It\n    lies."""\n    raise E(f"a {x} told")\ny = "lies"\n'
    lines = [line + offset for line, text in python_sentences(python) for offset, _ in dialect_in(text)]
    assert sorted(lines) == [2, 5, 6]
    native = 'int lies;  // it\n// lies here\nerror("it is told");\n'
    assert [line + offset for line, text in native_sentences(native) for offset, _ in dialect_in(text)] == [2, 3]
    page = "It\nlies.\n```\nit lies\n```\nand\ntells\n"
    assert [line + offset for line, text in page_sentences(page) for offset, _ in dialect_in(text)] == [2, 7]


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
