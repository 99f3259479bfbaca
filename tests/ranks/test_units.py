"""The units that processes claim: what shares something costly stays together, and the longest come first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import units

FILE = """
import functools, pytest

@pytest.fixture(scope="module")
def costly(): return 1

@pytest.fixture
def cheap(): return 1

def test_short(cheap): ...
def test_shares(costly): ...
def test_long(tmp_path): ...
def test_shares_too(costly): ...
@pytest.mark.parametrize("number", range(3))
def test_many(number): ...
"""
CACHED = """
import functools

@functools.cache
def costly(): return 1

def test_one(): ...
def test_other(): ...
"""


class _Catch:
    items: list[pytest.Item]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def _names(folder: Path, seconds: dict[str, float]) -> list[list[str]]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    caught = _Catch()
    # `unraisableexception` looks for garbage at the end, among all that this process's other tests have left.
    without = ("-p", "no:cacheprovider", "-p", "no:unraisableexception")
    done = pytest.main(["--collect-only", "-q", *without, "-c", f"{folder}/pytest.ini", str(folder)], plugins=[caught])
    assert done == pytest.ExitCode.OK
    return [[item.name for item in unit] for unit in units.units_of(caught.items, seconds)]


def test_units_of_files(tmp_path: Path) -> None:
    (tmp_path / "test_units_a.py").write_text(FILE)
    (tmp_path / "test_units_b.py").write_text(CACHED)
    seconds = {
        "test_units_a.py::test_long": 5.0,
        "test_units_b.py::test_other": 9.0,
        "test_units_a.py::test_short": 2.0,
    }
    many = [f"test_many[{number}]" for number in range(3)]
    assert _names(tmp_path, seconds) == [
        ["test_one", "test_other"], ["test_long"], ["test_short", *many], ["test_shares", "test_shares_too"]
    ]  # fmt: skip


def test_many_short_tests_are_several_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_units_c.py").write_text(FILE)
    monkeypatch.setattr(units, "MOST_S", 2 * units.DEFAULT_S)
    found = _names(tmp_path, {})
    assert sorted(map(len, found)) == [1, 2, 2, 2]
    assert sum(name == "test_many[1]" for unit in found for name in unit) == 1


def test_table_keeps_what_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "TABLE", tmp_path / "durations.json")
    assert units.durations() == {}
    units.record({"b": 2.04, "a": 3.0, "short": 0.1})
    units.record({"a": 0.5, "c": 7.26})
    assert units.durations() == {"b": 2.0, "c": 7.3}
    assert (tmp_path / "durations.json").read_text() == json.dumps({"b": 2.0, "c": 7.3}, indent=0) + "\n"


def test_table_is_of_tests_that_are_there() -> None:
    """Files that went away or were renamed are none; `--record-durations` writes those of today."""
    root = units.TABLE.parents[1]
    gone = {test for test in units.durations() if not (root / test.partition("::")[0]).exists()}
    assert not gone, f"{len(gone)} tests of tests/durations.json have no file, such as {min(gone)}"


def test_a_test_on_a_gpu_of_unknown_length_is_a_unit_of_its_own(tmp_path: Path) -> None:
    text = "import pytest\n\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(2))\ndef test_gpu(n): ...\n"
    text += "\ndef test_cpu(): ...\n"
    (tmp_path / "test_file.py").write_text(text)
    assert _names(tmp_path, {}) == [["test_gpu[0]"], ["test_gpu[1]"], ["test_cpu"]]
    known = {"test_file.py::test_gpu[0]": 0.5, "test_file.py::test_gpu[1]": 0.5}
    assert _names(tmp_path, known) == [["test_gpu[0]", "test_gpu[1]", "test_cpu"]]
