"""Every supported Python of this host compiles the sources without a warning, and its headers fit the native part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from distribution import check
from distribution.pythons import Interpreter, examined, find, releases
from weaveopt.versions import PYTHON

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("weaveopt", "rewrites", "cost_model", "examples", "benchmarks", "distribution", "tests")
COMPILE = """
import pathlib, sys, warnings
warnings.simplefilter("error")
sources = [path for folder in sys.argv[1:] for path in pathlib.Path(folder).rglob("*.py")]
for path in sources:
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
print(len(sources))
"""
INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"
FOUND = find()
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OTHERS = [python for python in FOUND if python.release != OWN] or list(FOUND)
"""With this one the native part was built; it is looked at where there is no other."""


def test_this_python_is_found() -> None:
    assert OWN in {python.release for python in FOUND} and PYTHON.least in releases()


def test_what_is_no_supported_python_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python2.7"
    old.write_text("#!/bin/sh\necho '[[2, 7], \"cpython-27\", true]'\n")
    old.chmod(0o755)
    assert examined(str(old)) is None
    with pytest.raises(SystemExit, match=r"--python .*python2.7: expected a Python of 3\.11, "):
        find([str(old)])
    free_threaded = tmp_path / "python3.13t"
    free_threaded.write_text("#!/bin/sh\necho '[[3, 13], \"cpython-313t-x86_64-linux-gnu\", true]'\n")
    free_threaded.chmod(0o755)
    assert examined(str(free_threaded)) is None


@pytest.mark.parametrize("python", FOUND, ids=lambda python: python.release)
def test_sources_compile_without_a_warning(python: Interpreter) -> None:
    """Among them those that a later Python gives for syntax that it will refuse."""
    command = [python.path, "-c", COMPILE, *(str(ROOT / folder) for folder in FOLDERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 500


@pytest.mark.parametrize("python", OTHERS, ids=lambda python: python.release)
def test_its_environments_install_wheels(python: Interpreter, tmp_path: Path) -> None:
    """Each by its own pip: Debian 12's fails for a Python 3.12."""
    inside = check.environment(python, tmp_path / "empty")
    command = [str(inside), "-m", "pip", "install", "--no-index", "--dry-run", "pip"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"python{python.release}/site-packages" in done.stdout


@pytest.mark.parametrize("python", OTHERS, ids=lambda python: python.release)
def test_the_native_part_fits_its_headers(python: Interpreter) -> None:
    """The bindings alone include Python."""
    include = subprocess.check_output([python.path, "-c", INCLUDE], text=True).strip()
    command = [
        "g++",
        "-std=c++17",
        "-fopenmp",
        "-fsyntax-only",
        "-Icsrc",
        f"-I{include}",
        f"-I{pybind11.get_include()}",
    ]
    done = subprocess.run([*command, "csrc/base/families.cpp"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
