"""No test passes because a loop over nothing asserted nothing."""

from __future__ import annotations

import pytest

from tests.graphs.nonempty import some
from tests.house.loops import Reached, reached_by_tests
from tests.house.source import ROOT

FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def test_every_test_asserts_something_whatever_it_loops_over() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in some(FILES)
        for name, reached in reached_by_tests(path.read_text()).items()
        if reached is Reached.MAYBE
    ]
    assert not found, "loop over some(values), of tests/graphs/nonempty.py, in:\n" + "\n".join(found)


SKIPPED = {
    "a list that may be empty": "for each in found():\n    assert each",
    "of a constant": "for each in (NOTHING, NOTHING):\n    for inner in each:\n        assert inner",
    "an inner loop": "for each in (1, 2):\n    for inner in found(each):\n        assert inner",
    "a filter": "for each in [one for one in (1, 2) if found(one)]:\n    assert each",
    "all of nothing": "assert all(each for each in found())",
    "all of a list": "assert all(found())",
    "a condition": "if found():\n    assert True",
    "no turn": "while found():\n    assert True",
    "a function's loop": "loops(found())",
    "a rank's loop": "run_ranks(loops, 2)",
    "values of a mapping": "for each in found().values():\n    assert each",
    "no numbers": "for each in range(0):\n    assert each",
    "as many as a number": "for each in range(found()):\n    assert each",
    "the shorter of two": "for one, other in zip((1, 2), found()):\n    assert one == other",
    "a call in a comprehension": "[check(each) for each in found()]",
}
REACHED = {
    "a literal": "for each in (1, 2):\n    assert each",
    "a constant": "for each in sorted(NUMBERS):\n    assert each",
    "a local name": "here = [each for each in NUMBERS]\nfor each in enumerate(here):\n    assert each",
    "names of names": "one = [1]\nother = list(one)\nfor each in other * 2:\n    assert each",
    "some": "for each in some(found()):\n    pass",
    "an assertion after the loop": "for each in found():\n    assert each\nassert found()",
    "one of an outer loop": "for each in (1, 2):\n    for inner in found(each):\n        assert inner\n    assert each",
    "both branches": "if found():\n    assert True\nelse:\n    raise_it()\n    assert False",
    "an error": "with pytest.raises(ValueError):\n    found()",
    "a function": "asserts(1)",
    "on ranks": "run_ranks(asserts, 2)",
    "ranks' values": "for each in run_ranks(found, 2):\n    assert each",
    "rank 0": "if rank == 0:\n    assert True",
    "as long as": "for one, other in zip((1, 2), found(), strict=True):\n    assert one == other",
    "numbers": "for each in range(1, 3):\n    assert each",
    "in a block": "with found():\n    try:\n        assert True\n    finally:\n        found()",
}
FILE = """
NUMBERS = {1, 2}
NOTHING = ()

def loops(values):
    for each in values:
        assert each

def asserts(value):
    assert value

def test_it(rank):
"""


def reached_by(body: str) -> Reached:
    (found,) = reached_by_tests(FILE + "\n".join(f"    {line}" for line in body.splitlines())).values()
    return found


@pytest.mark.parametrize("name", SKIPPED)
def test_skipped_assertions_are_found(name: str) -> None:
    assert reached_by(SKIPPED[name]) is Reached.MAYBE


@pytest.mark.parametrize("name", REACHED)
def test_assertions_that_are_reached(name: str) -> None:
    assert reached_by(REACHED[name]) is Reached.ALWAYS


def test_some_is_of_at_least_one() -> None:
    assert some(each for each in (1, 2)) == [1, 2]
    with pytest.raises(AssertionError, match="found no values to check"):
        some(each for each in (1, 2) if each > 2)
    with pytest.raises(AssertionError, match="found no kernels"):
        some([], "kernels")
