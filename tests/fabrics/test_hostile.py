"""No value that Python can give ends the process: every native binding raises, or does what it says."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.fabrics.hostile import callees, load, needs_gpu


def test_no_value_ends_the_process() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.fabrics.hostile"], capture_output=True, text=True, timeout=300, check=False
    )
    lines = found.stdout.splitlines()
    last = "\n".join([*lines[-1:], found.stderr[-2000:]])
    assert found.returncode == 0, f"ended with {found.returncode} in {last}"
    counts = dict(re.findall(r"^# (\S+): (\d+) calls$", found.stdout, re.MULTILINE))
    every = {f"{each.owner}.{each.name}": each for each in callees(load())}
    assert counts.keys() == every.keys(), counts
    idle = [name for name, each in every.items() if counts[name] == "0" and not needs_gpu(each.owner)]
    assert not idle, f"never called: {idle}"


def test_everything_that_can_be_called_is() -> None:
    """The stub, from which calls are made, leaves out nothing of the module."""
    native = load()
    known = {(each.owner, each.name) for each in callees(native)}
    functions = {("", name) for name, each in vars(native).items() if callable(each) and not isinstance(each, type)}
    methods = {
        (name, method)
        for name, kind in vars(native).items()
        if isinstance(kind, type) and not hasattr(kind, "__members__")
        for method, each in vars(kind).items()
        if callable(each) and not method.startswith("__") and not method.startswith("_pybind")
    }
    assert functions | methods <= known, sorted((functions | methods) - known)
