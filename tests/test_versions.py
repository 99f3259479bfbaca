"""`weaveopt/versions.py` is the one table of versions: metadata, docs, Makefile and pins agree with it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import weaveopt
from weaveopt import versions
from weaveopt.versions import PYTHON, SUPPORTED, TORCH, TRANSFORMERS, Supported

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = " ".join((ROOT / "README.md").read_text().split())
PACKAGES = [package for package in SUPPORTED if package is not PYTHON]
PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
(INSTALLED_TORCH,) = re.findall(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_python_is_the_projects() -> None:
    project = PYPROJECT["project"]
    assert project["requires-python"] == f">={PYTHON.least}"
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert tuple(named) == PYTHON.tested
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHON.least.replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHON.least


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_projects_bounds_are_the_oldest_supported(package: Supported) -> None:
    assert f"{package.name}>={package.least}" in PYPROJECT["project"]["dependencies"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_ci_installs_what_is_called_tested(package: Supported) -> None:
    pinned = INSTALLED_TORCH if package is TORCH else PINNED[package.name]
    assert versions.release(pinned) in package.tested


def test_the_lanes_install_every_dependency() -> None:
    """The oldest lane at exactly the lower bounds, the newest without any bound."""
    bounds = dict(each.split(">=") for each in PYPROJECT["project"]["dependencies"])
    oldest = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements-oldest.txt").read_text(), re.MULTILINE))
    assert {name: versions.release(oldest[name]) for name in bounds} == {
        name: versions.release(least) for name, least in bounds.items()
    }
    newest = [line for line in (ROOT / "requirements-newest.txt").read_text().splitlines() if line and line[0] != "#"]
    assert set(bounds) < set(newest) and all(re.fullmatch(r"[\w-]+", name) for name in newest)


def test_the_lanes_run_files_that_exist() -> None:
    (tests,) = re.findall(r"^TESTS := (tests/(?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = tests.replace("\\", " ").split()
    assert [each for each in named if not (ROOT / each).exists()] == []
    files = [file for each in named for file in ((ROOT / each).glob("test_*.py") if (ROOT / each).is_dir() else [each])]
    assert len(files) >= 12


@pytest.mark.parametrize("package", SUPPORTED, ids=lambda package: package.name)
def test_docs_have_the_row(package: Supported) -> None:
    row = f"| {package.name} | {package.least} | {', '.join(package.tested)} |"
    assert row in (ROOT / "docs" / "versions.md").read_text().splitlines()


def test_the_readme_and_options_name_the_same() -> None:
    bounds = f"Python {PYTHON.least}, torch {TORCH.least}, transformers {TRANSFORMERS.least}, or newer"
    assert bounds in README
    assert f"CI runs torch {INSTALLED_TORCH}" in README and f"pip install torch=={INSTALLED_TORCH}" in README
    assert f"(default `torch=={INSTALLED_TORCH}`)" in (ROOT / "docs" / "options.md").read_text()


def test_requirements_cannot_replace_torch(tmp_path: Path) -> None:
    """For a pin that does not fit this torch, such as another Triton, pip would take an older one, in silence."""
    command = ["make", "-n", f"VENV={tmp_path}", "TORCH=torch==7.7.7", f"{tmp_path}/.installed"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in shown.splitlines() if "pip install" in line]
    assert len(installs) == 2 and all("torch==7.7.7" in line for line in installs)


def test_triton_is_the_one_that_torch_requires() -> None:
    """If its build is for GPUs; builds for CPUs alone require none."""
    required = [each for each in importlib.metadata.requires("torch") or () if each.startswith("triton==")]
    pins = {each.split(";")[0].strip() for each in required}
    assert pins == ({f"triton=={PINNED['triton']}"} if torch.version.cuda else set())


def test_the_makefile_asks_for_the_oldest_python() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"sys.version_info < ({PYTHON.least.replace('.', ', ')})" in makefile
    assert f"no Python of at least {PYTHON.least} found" in makefile


@pytest.mark.parametrize("package", SUPPORTED, ids=lambda package: package.name)
def test_tested_releases_ascend_from_the_oldest_supported(package: Supported) -> None:
    keys = [tuple(map(int, each.split("."))) for each in (package.least, *package.tested)]
    assert keys == sorted(keys) and len(set(package.tested)) == len(package.tested)


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == PYPROJECT["project"]["version"] == weaveopt.__version__


def test_security_says_which_versions_get_fixes() -> None:
    major, minor, _ = PYPROJECT["project"]["version"].split(".")
    assert f"| {major}.{minor}.x |" in (ROOT / "SECURITY.md").read_text()
