"""The source distribution: whole, from tracked files alone. `make dist` makes it, and wheels of it."""

from __future__ import annotations

import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from distribution import check
from distribution.build import LOCAL_VERSION, extracted, hook, make_sdist

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_source_distribution_is_whole_and_takes_a_local_version(tmp_path: Path) -> None:
    """As wheels with the CUDA part have it."""
    made = make_sdist(Path(sys.executable), tmp_path)
    check.sdist(made)
    tree = extracted(made, tmp_path / "unpacked")
    (tree / "setup.cfg").write_text(LOCAL_VERSION.format("130"))
    info = hook(Path(sys.executable), "prepare_metadata_for_build_wheel", tree, tmp_path / "info")
    assert info.name == f"weaveopt-{VERSION}+cu130.dist-info"


def test_a_distribution_that_lacks_docs_or_holds_tests_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "weaveopt-0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(ROOT / "README.md", "weaveopt-0/tests/test_stray.py")
    with pytest.raises(SystemExit, match=r"lacks CHANGELOG\.md"):
        check.sdist(path)
    monkeypatch.setattr(check, "PAGES", ())
    monkeypatch.setattr(check, "FOLDERS", ())
    with pytest.raises(SystemExit, match=r"holds tests/test_stray\.py"):
        check.sdist(path)
