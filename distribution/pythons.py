"""Interpreters of this host that wheels are built with: one for each supported release."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weaveopt.versions import PYTHON

ASK = (
    "import ensurepip, json, os, sys, sysconfig, venv\n"
    "headers = os.path.join(sysconfig.get_path('include'), 'Python.h')\n"
    "print(json.dumps([list(sys.version_info[:2]), sysconfig.get_config_var('SOABI'), os.path.exists(headers)]))"
)
PYENV = Path.home() / ".pyenv" / "versions"


@dataclass(frozen=True)
class Interpreter:
    path: str
    release: str
    """`3.13`."""

    @property
    def tag(self) -> str:
        """The interpreter's tag in a wheel's name: `cp313`."""
        return f"cp{self.release.replace('.', '')}"


def releases() -> Iterator[str]:
    """Every supported release, up to the newest that was tested."""
    first, last = (int(each.split(".")[1]) for each in (PYTHON.least, PYTHON.tested[-1]))
    for minor in range(first, last + 1):
        yield f"3.{minor}"


def examined(path: str) -> Interpreter | None:
    """The interpreter at `path` if it is supported, makes environments and has headers, else None."""
    done = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    (major, minor), soabi, has_headers = json.loads(done.stdout)
    release = f"{major}.{minor}"
    # A free-threaded build has another ABI: `cpython-313t`.
    usable = has_headers and release in releases() and str(soabi).split("-")[1] == f"{major}{minor}"
    return Interpreter(path, release) if usable else None


def candidates(release: str) -> Iterator[str]:
    """Places of an interpreter of this release: PATH, the distribution's place, pyenv's versions."""
    name = f"python{release}"
    named = shutil.which(name)
    if named is not None:
        yield named
    for path in (Path("/usr/bin") / name, *sorted(PYENV.glob(f"{release}.*/bin/{name}"), reverse=True)):
        if path.exists():
            yield str(path)


def find(named: Sequence[str] = ()) -> tuple[Interpreter, ...]:
    """The interpreters `named`, or the first usable one of every supported release. Raises `SystemExit` for a named one
    that cannot build."""
    if named:
        found = [(path, examined(path)) for path in named]
        unusable = [path for path, interpreter in found if interpreter is None]
        if unusable:
            raise SystemExit(
                f"--python {unusable[0]}: expected a Python of {', '.join(releases())} with headers and venv"
            )
        return tuple(interpreter for _, interpreter in found if interpreter is not None)
    first = (next(filter(None, map(examined, candidates(release))), None) for release in releases())
    return tuple(interpreter for interpreter in first if interpreter is not None)
