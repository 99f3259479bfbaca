"""Checks what was built: the source distribution is whole, and wheels run in empty environments without a compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

from distribution.pythons import Interpreter

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "LICENSE")
FOLDERS = ("weaveopt", "rewrites", "cost_model", "csrc", "docs", "examples")
"""All that is tracked of them is in a source distribution; of tests and benchmarks nothing."""
NATIVE = "from weaveopt import _native; print(_native.has_cuda, _native.CUDA_ARCHS if _native.has_cuda else '')"
EXPLAIN = ("explain", "llama-3.3-70b", "--tp", "2", "--layers", "1", "--tokens", "64")


def tracked(folder: str) -> set[str]:
    listed = subprocess.check_output(["git", "ls-files", "-z", folder], cwd=ROOT, text=True)
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def sdist(path: Path) -> None:
    """Raises `SystemExit` unless all sources, docs and examples are there, and nothing that no user needs."""
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = set(PAGES).union(*map(tracked, FOLDERS))
    if missing := sorted(wanted - held):
        raise SystemExit(f"{path.name} lacks {', '.join(missing[:10])}")
    if stray := sorted(name for name in held if name.partition("/")[0] in ("tests", "benchmarks", "build")):
        raise SystemExit(f"{path.name} holds {', '.join(stray[:10])}")


def wheel(path: Path, python: Interpreter, folder: Path, cuda: bool, complete: bool) -> None:
    """Raises `SystemExit` unless the wheel has a manylinux tag, installs, loads and answers."""
    if not re.search(r"-manylinux_2_\d+_x86_64(\.manylinux\w+)*\.whl$", path.name):
        raise SystemExit(f"{path.name}: expected a manylinux tag")
    installed(path, python, folder, cuda, complete)


def environment(python: Interpreter, folder: Path) -> Path:
    """The interpreter of a new environment in `folder` that holds nothing but pip, as another one's pip may know no
    later Python than its own."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python.path, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def installed(path: Path, python: Interpreter, folder: Path, cuda: bool, complete: bool) -> None:
    """Raises `SystemExit` unless the wheel runs in a new environment in `folder`, with no compiler on PATH.

    With `complete` its dependencies are installed too; else those of the environment that runs this are used where
    it has the same Python, and other Pythons load the native part and the command alone.
    """
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=True)
    inside = environment(python, folder)
    pip = [str(inside), "-m", "pip", "install", "-q", *(() if complete else ("--no-deps",))]
    subprocess.run([*pip, str(path)], check=True)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}" == python.release
    if own and not complete:
        (site,) = (folder / "lib").glob("python*/site-packages")
        (lent,) = (folder_of for folder_of in sys.path if (Path(folder_of) / "torch" / "version.py").exists())
        (site / "lent.pth").write_text(f"{lent}\n")

    def answer(*command: str) -> str:
        environment = {"PATH": str(folder / "bin"), "HOME": str(folder), "CXX": ""}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{path.name}: {' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout.strip()

    command = str(folder / "bin" / "weaveopt")
    if answer(command, "--version") != f"weaveopt {metadata.version}":
        raise SystemExit(f"{path.name}: weaveopt --version does not say {metadata.version}")
    built = answer(str(inside), "-c", NATIVE)
    if built.startswith("True") is not cuda or (cuda and "80;90;100+PTX" not in built):
        raise SystemExit(f"{path.name}: expected {'80;90;100+PTX' if cuda else 'no CUDA part'}, found {built}")
    if own or complete:
        if "g++ not found" not in (said := answer(command, "doctor")):
            raise SystemExit(f"{path.name}: a compiler is on PATH:\n{said}")
        answer(command, *EXPLAIN)
