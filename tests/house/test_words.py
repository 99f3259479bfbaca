"""Messages: a number and its noun agree, everywhere."""

from __future__ import annotations

import ast
import re

from tests.house.source import FILES, ROOT
from weaveopt.wording import counted, listed

NOUNS = (
    "ranks|tokens|hosts|sites|graphs|calls|steps|layers|collectives|places|buffers|CTAs|GPUs|rows|devices|experts|"
    "columns|dimensions|candidates|peers|copies|sequences|cores|kinds|changes|replays|errors|files"
)
NOUN_AFTER = re.compile(rf" (?:\w+ )?(?:{NOUNS})\b")
PRINTED = [*FILES.values(), *(path for folder in ("examples", "benchmarks") for path in (ROOT / folder).glob("*.py"))]
ROOMS_OF_SIZES = (
    "benchmarks",
    "measure",
    "ops",
    "rewrites",
    "sites",
    "graph",
    "cost_model",
)
"""Their numbers are sizes of kernels and of groups that communicate, which are never 1."""
NO_NUMBERS = {"device.type", "here.device.type", "fabric.value", "count.node.expr", "shape", "letter"}
LISTS = {"[len(each) for each in ranks]"}
NEVER_ONE = {"request.world", "self.total", "args.new_tokens"}
"""One rank and one layer have words of their own in the line before; 4 tokens are the least."""


def numbers_before_plurals(source: str) -> list[str]:
    """Every value of an f-string that a plural noun follows, but for what `counted` wrote and what is no number."""
    found = []
    for string in ast.walk(ast.parse(source)):
        if not isinstance(string, ast.JoinedStr):
            continue
        for value, after in zip(string.values, string.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            words = ast.unparse(value.value)
            if (
                NOUN_AFTER.match(str(after.value))
                and "counted(" not in words
                and words not in NO_NUMBERS | NEVER_ONE | LISTS
            ):
                found.append(f"{words}{str(after.value)[:20]}")
    return found


def bracketed_plurals(source: str) -> list[str]:
    tree = ast.parse(source)
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in docstrings]
    return [text for text in strings if isinstance(text, str) and re.search(r"\w\((?:s|es)\)(?:\W|$)", text)]


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in range(3)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "copy", "copies") for number in (1, 2)] == ["1 copy", "2 copies"]
    assert (listed("rank", (3,)), listed("rank", (0, 3))) == ("rank 3", "ranks 0, 3")


def test_no_message_has_a_plural_in_brackets() -> None:
    found = {str(path.relative_to(ROOT)): bracketed_plurals(path.read_text()) for path in PRINTED}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_a_number_before_a_plural_is_counted() -> None:
    seen = [path for path in PRINTED if not set(path.relative_to(ROOT).parts) & set(ROOMS_OF_SIZES)]
    found = {str(path.relative_to(ROOT)): numbers_before_plurals(path.read_text()) for path in seen}
    assert len(seen) > 100 and {path: texts for path, texts in found.items() if texts} == {}
    assert numbers_before_plurals("f\"{n} usable cores, {len(x)} rows, {counted(n, 'rank')} of ranks\"") == [
        "n usable cores, ",
        "len(x) rows, ",
    ]
