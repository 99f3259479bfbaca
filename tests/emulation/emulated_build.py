"""Builds device code for the CPU, with what stands in for CUDA in `tests/emulation/gpu`, and loads it.

A build may hold mistakes, each of which a test switches on for a while (`Mistake`, `making`): one build serves the
tests of the code as it is and those of what these tests notice.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

EMULATED = Path(__file__).parent / "gpu"
CSRC = Path(__file__).parents[2] / "csrc"


def compile_with(*arguments: str) -> None:
    """Runs the C++ compiler; fails with what it says if it does."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "no C++ compiler, with which the native module is built too"
    # Checked jumps (`_FORTIFY_SOURCE`) may not go to another stack, as coroutines do.
    command = [compiler, "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@dataclass(frozen=True)
class Mistake:
    """A place in `csrc` where the emulated code does something else as long as the mistake is switched on."""

    path: str
    right: str
    """The place begins with it."""
    switched: str
    """Replacement of `right`, with `WRONG` as the condition."""
    followed_by: str = ""
    """Text after `right` that distinguishes the place from others of the same text."""


def without(path: str, line: str, followed_by: str = "") -> Mistake:
    """A statement of one line is left out."""
    return Mistake(path, line, f"if (!WRONG) {line}", followed_by)


Mistakes = Mapping[str, Mistake]


def library(
    sources: Sequence[Path],
    includes: Sequence[Path] = (),
    mistakes: Mistakes | None = None,
    flags: Sequence[str] = ("-O1",),
) -> ctypes.CDLL:
    """Built once for all processes of all runs, until a file of `csrc` or of the emulation changes.

    Its function `run` says what failed, or nothing.
    """
    return _library(tuple(sources), tuple(includes), tuple((mistakes or {}).values()), tuple(flags))


@contextmanager
def making(mistake: str, mistakes: Mistakes, built: ctypes.CDLL) -> Iterator[None]:
    """Switches a mistake on; none if it has no name."""
    switch = ctypes.c_int.in_dll(built, "weave_mistake")
    switch.value = [*mistakes].index(mistake) + 1 if mistake else 0
    try:
        yield
    finally:
        switch.value = 0


@cache
def _library(
    sources: tuple[Path, ...], includes: tuple[Path, ...], mistakes: tuple[Mistake, ...], flags: tuple[str, ...]
) -> ctypes.CDLL:
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "emulated")  # of this run's user, see conftest.py
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["-Wno-unknown-pragmas", "-shared", *flags]
    places = [str(each) for each in (*sources, *includes)]
    text = repr((arguments, places, mistakes, _contents(EMULATED), _contents(CSRC)))
    built = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of this run may be at it
        if not built.exists():
            with tempfile.TemporaryDirectory() as made:
                csrc = Path(made, "csrc")
                shutil.copytree(CSRC, csrc)
                _put_in(mistakes, csrc)
                of_copy = [csrc / each.relative_to(CSRC) if each.is_relative_to(CSRC) else each for each in sources]
                arguments += [f"-I{each}" for each in (*includes, csrc)] + [str(each) for each in of_copy]
                compile_with(*arguments, "-o", str(unfinished := Path(made, "built.so")))
                shutil.copy(unfinished, built.with_suffix(".new"))
            built.with_suffix(".new").replace(built)
    found = ctypes.CDLL(str(built))
    found.run.restype = ctypes.c_char_p
    return found


def _put_in(mistakes: Sequence[Mistake], csrc: Path) -> None:
    """Writes the switches into a copy of the sources."""
    for path in {each.path for each in mistakes}:
        text = (csrc / path).read_text()
        places: list[tuple[int, str, str]] = []
        for number, each in enumerate(mistakes, 1):
            if each.path == path:
                place = each.right + each.followed_by
                assert text.count(place) == 1, f"{path}: {text.count(place)} places of {place!r}"
                condition = f"(weave_mistake == {number})"
                places.append((text.index(place), each.right, each.switched.replace("WRONG", condition)))
        for at, right, switched in sorted(places, reverse=True):
            text = text[:at] + switched + text[at + len(right) :]
        (csrc / path).write_text(f'extern "C" int weave_mistake;\n{text}')


@cache
def _contents(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()
