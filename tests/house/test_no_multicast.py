"""Programs of this repository run with NVLink multicast off, which can put the GPUs of a shared host out of service.

Every program of the tests and benchmarks is a module of their packages, which set the variables when they are imported,
whoever starts it; `make` exports them to all that it runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.graphs.nonempty import some
from tests.house.source import ROOT
from weaveopt.cli.calibrate import NO_MULTICAST

UNSET = {name: value for name, value in os.environ.items() if name not in NO_MULTICAST}
SAY = f"import os; print(*(os.environ.get(name) for name in {sorted(NO_MULTICAST)}))"
SAID = " ".join(NO_MULTICAST[name] for name in sorted(NO_MULTICAST))


def said(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env=UNSET, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_torchs_own_variable_is_one_of_them() -> None:
    assert NO_MULTICAST["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert {name: os.environ.get(name) for name in NO_MULTICAST} == NO_MULTICAST, "in this very process"


@pytest.mark.parametrize("package", ["tests.gpu", "benchmarks"])
def test_a_program_of_tests_or_benchmarks_switches_it_off_for_itself(package: str) -> None:
    """As one that is started by torchrun, by a checker or by hand."""
    assert said(sys.executable, "-c", f"import {package}; {SAY}") == SAID


def test_all_programs_belong_to_those_packages() -> None:
    for folder in ("tests", "benchmarks"):
        for path in some((ROOT / folder).rglob("*.py")):
            packages = [each for each in path.relative_to(ROOT).parents if (ROOT / each / "__init__.py").exists()]
            assert any(str(each) == folder for each in packages), path


def test_make_exports_it_to_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, value in some(NO_MULTICAST.items()):
        assert re.search(rf"^export {name} := {value}$", makefile, re.MULTILINE), name
        assert len(re.findall(name, makefile)) == 1, "in one place"


def test_nothing_takes_the_variable_away() -> None:
    """But the pair that sets it for one rendezvous, where it was not set before."""
    taken = re.compile(r"(unsetenv|environ\.pop|delenv|del os\.environ|unset\b)")
    found = []
    for folder in ("weaveopt", "rewrites", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if taken.search(line) and re.search("MULTICAST|NVLS", line):
                    found.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert [line.partition(" ")[2] for line in found if "test_no_multicast" not in line] == [
        "del os.environ[_MULTICAST_OFF]"
    ]
