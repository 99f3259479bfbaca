"""One run of tests by two processes: both work, every test is reported once, and nothing that goes wrong is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
WAITS = """
import os, pathlib, time, pytest
HERE = pathlib.Path(__file__).parent

@pytest.mark.parametrize("number", range(3))
def test_other_process_is_there(number):
    pathlib.Path(HERE, "{own}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 30
    while not pathlib.Path(HERE, "{other}").exists():
        assert time.monotonic() < deadline, "only one process"
        time.sleep(0.01)
    assert pathlib.Path(HERE, "{other}").read_text() != str(os.getpid())
"""


def run(folder: Path, *arguments: str, marker: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers = {marker}\n")
    options = ["-p", "tests.ranks.processes", "--processes", "2", *arguments]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of tests that end only when each of them has begun."""
    (tmp_path / "test_a.py").write_text(WAITS.format(own="a", other="z"))
    (tmp_path / "test_z.py").write_text(WAITS.format(own="z", other="a"))
    return tmp_path


def test_two_processes_make_one_report(folder: Path) -> None:
    with open(folder / "test_z.py", "a") as file:
        file.write(
            "\ndef test_wrong():\n    assert 1 == 2\n\n@pytest.mark.skip(reason='for now')\ndef test_no(): ...\n"
        )
    done = run(folder, "--junitxml", str(folder / "report.xml"))
    assert done.returncode == 1, done.stdout
    assert "1 failed, 6 passed, 1 skipped" in done.stdout and "assert 1 == 2" in done.stdout, done.stdout
    cases = [
        (case.get("classname"), case.get("name")) for case in ElementTree.parse(folder / "report.xml").iter("testcase")
    ]
    assert len(cases) == len(set(cases)) == 8


def test_a_test_that_has_to_be_alone_runs_when_all_others_have_ended(folder: Path) -> None:
    other = "\nimport time, pathlib\n\ndef test_long():\n    time.sleep(3)\n    pathlib.Path(HERE, 'ended').touch()\n"
    alone = "\n@pytest.mark.alone\ndef test_alone():\n    assert pathlib.Path(HERE, 'ended').exists()\n"
    with open(folder / "test_a.py", "a") as file:
        file.write(alone)
    with open(folder / "test_z.py", "a") as file:
        file.write(other)
    done = run(folder, marker="alone: no other test runs with it")
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout


def test_a_process_that_dies_fails_the_run(folder: Path) -> None:
    with open(folder / "test_a.py", "a") as file:  # the longest is the first process's
        file.write("".join(f"\ndef test_more_{number}(): ...\n" for number in range(4)))
    with open(folder / "test_z.py", "a") as file:
        file.write("\ndef test_dies():\n    os.write(2, b'my last words')\n    os._exit(0)\n\ndef test_after(): ...\n")
    done = run(folder, "-s")
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout
    assert "2 tests did not run" in done.stdout and "test_z.py::test_dies" in done.stdout, done.stdout


def test_words_of_a_process_that_cannot_work_are_shown(folder: Path) -> None:
    own = "import sys\nif any('--helper' in word for word in sys.argv):\n    raise RuntimeError('no helper of mine')\n"
    (folder / "conftest.py").write_text(own)
    (folder / "test_a.py").write_text("def test_a(): ...\n")
    (folder / "test_z.py").write_text("def test_z(): ...\n")
    done = run(folder)
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout
    assert "2 passed" in done.stdout and "no helper of mine" in done.stdout, done.stdout


def test_the_first_failure_ends_both(folder: Path) -> None:
    (folder / "test_a.py").write_text(WAITS.format(own="a", other="z") + "\ndef test_wrong():\n    assert False\n")
    (folder / "test_z.py").write_text(f"{WAITS.format(own='z', other='a')}\n    time.sleep(2 * {LIMIT_S})\n")
    done = run(folder, "-x")
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout
