"""Builds device code for the CPU, with what stands in for CUDA in `tests/emulated_gpu`, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

EMULATED = Path(__file__).parent / "emulated_gpu"
CSRC = Path(__file__).parents[1] / "csrc"


def compile_with(*arguments: str) -> None:
    """Runs the C++ compiler; fails with what it says if it does."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "no C++ compiler, with which the native module is built too"
    command = [compiler, "-std=c++17", "-fPIC", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def library(
    sources: Sequence[Path], includes: Sequence[Path], csrc: Path = CSRC, flags: Sequence[str] = ("-O1",)
) -> ctypes.CDLL:
    """Built once for all processes of all runs, until a file of `csrc` or of the emulation changes.

    Its function `run` says what failed, or nothing.
    """
    arguments = ["-Wno-unknown-pragmas", "-shared", *flags]
    arguments += [f"-I{folder}" for folder in (*includes, csrc)] + [str(source) for source in sources]
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "emulated")  # of this run's user, see conftest.py
    folder.mkdir(parents=True, exist_ok=True)
    # Not where they lie, as copies of `csrc` with a mistake in them lie elsewhere in every run.
    text = repr((arguments, _contents(EMULATED), _contents(csrc))).replace(str(csrc), "csrc")
    built = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        compile_with(*arguments, "-o", str(unfinished))
        unfinished.replace(built)
    found = ctypes.CDLL(str(built))
    found.run.restype = ctypes.c_char_p
    return found


@cache
def _contents(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()
