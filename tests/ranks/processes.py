"""`pytest -p tests.ranks.processes --processes 2`: one run of tests by several processes, one report and one exit code.

Every process collects all tests, all at the same time, then claims one unit of tests after the other, the longest
first, until none is left (`tests/ranks/units.py`). What a helper reports the first process prints and counts as its
own, whenever it is through with a test itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks.units import Unit, durations, is_alone, record, units_of

POLL_S = 0.1
INTERRUPT_S = 30.0
"""Time that a helper has to end its tests' ranks."""
OUTPUT_BYTES = 5000
PROCESS = "WEAVE_TEST_PROCESS"
"""The variable that numbers the processes of a run: 1 and up in helpers, and not set in the first."""
BEGIN = "begin"
"""File whose existence lets helpers claim units."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("processes")
    group.addoption("--processes", type=int, default=1, help="how many processes run the tests")
    group.addoption("--record-durations", action="store_true", help="write what tests took to tests/durations.json")
    group.addoption("--helper", default="", help="FOLDER:NUMBER of a helper; given by the process that starts it")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if given := config.getoption("--helper"):
        config.workerinput = {}  # type: ignore[attr-defined]  # pytest's plugins write no files then
        folder, _, number = given.rpartition(":")
        os.environ[PROCESS] = str(int(number) + 1)
        config.pluginmanager.register(Helper(config, Path(folder), int(number)))
    elif config.getoption("--processes") > 1 and not config.getoption("usepdb"):
        config.pluginmanager.register(Processes(config))


def claim(folder: Path, number: int) -> bool:
    """Claims a unit for this process; true if no other process has claimed it."""
    try:
        os.close(os.open(folder / f"claimed-{number}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def run_unit(session: pytest.Session, unit: Unit, after_test: Callable[[], None] = lambda: None) -> None:
    for item, following in zip(unit, [*unit[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        after_test()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


class Helper:
    """Runs units that it claims. Each event goes to a file, as a line of JSON."""

    def __init__(self, config: pytest.Config, folder: Path, number: int) -> None:
        self._config, self._folder, self._parent = config, folder, os.getppid()
        # A shell's background jobs, and what these start, ignore it; the first process ends this one with it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._events = open(folder / f"events-{number}", "a", buffering=1)  # noqa: SIM115  # until the process ends

    def _tell(self, *event: object) -> None:
        self._events.write(json.dumps(event) + "\n")

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("start", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("finish", nodeid, location)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        units = units_of([item for item in session.items if not is_alone(item)], durations())
        while os.getppid() == self._parent and not (self._folder / BEGIN).exists():
            time.sleep(POLL_S)
        for number, unit in enumerate(units):
            if os.getppid() == self._parent and claim(self._folder, number):
                run_unit(session, unit)
        return True


class Processes:
    """The first process: runs units that it claims, and reports for all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._read: dict[int, int] = {}
        """Bytes of each helper's events that were passed on."""
        self._ended: set[str] = set()
        """Tests that ran to their end, by whichever process."""
        self._seconds: dict[str, float] = {}
        """Seconds by test, fixtures included."""
        self._started = ExitStack()
        """Ends helpers that are still there, and removes the folder."""

    def pytest_sessionstart(self) -> None:
        if not self._config.option.collectonly:
            self._folder = Path(self._started.enter_context(tempfile.TemporaryDirectory(prefix="weaveopt-processes-")))
            self._helpers = self._started.enter_context(self._helping(self._folder))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._started.close()
        if self._config.getoption("--record-durations"):
            record(self._seconds)  # of a run that was interrupted too: the next one is ordered by them

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "teardown":
            self._ended.add(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        units = units_of([item for item in session.items if not is_alone(item)], durations())
        alone = [item for item in session.items if is_alone(item)]
        if session.testsfailed or self._config.option.collectonly or len(units) < 2:
            self._started.close()
            return None  # pytest's own loop does it
        folder, helpers = self._folder, self._helpers
        (folder / BEGIN).touch()

        def pass_on() -> None:
            self._pass_on(session, folder, helpers)

        for number, unit in enumerate(units):
            if claim(folder, number):
                run_unit(session, unit, pass_on)
        while any(helper.poll() is None for helper in helpers):
            time.sleep(POLL_S)
            pass_on()
        pass_on()
        if alone:
            run_unit(session, alone)
        self._check(session, folder, helpers)
        return True

    @contextmanager
    def _helping(self, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
        arguments = [sys.executable, "-m", "pytest", *self._config.invocation_params.args]
        helpers = []
        for number in range(self._config.getoption("--processes") - 1):
            (folder / f"events-{number}").touch()
            with open(folder / f"output-{number}", "wb") as output:
                command = [*arguments, "--helper", f"{folder}:{number}"]
                directory = self._config.invocation_params.dir
                helpers.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=directory)
                )
        try:
            yield helpers
        finally:
            for helper in helpers:
                if helper.poll() is None and (folder / BEGIN).exists():
                    helper.send_signal(signal.SIGINT)  # pytest ends what the test has begun
                elif helper.poll() is None:
                    helper.kill()
            for helper in helpers:
                try:
                    helper.wait(INTERRUPT_S)
                except subprocess.TimeoutExpired:
                    helper.kill()
                    helper.wait()

    def _pass_on(self, session: pytest.Session, folder: Path, helpers: list[subprocess.Popen[bytes]]) -> None:
        """Reports the helpers' events since the last time."""
        hook = self._config.hook
        for number in range(len(helpers)):
            with open(folder / f"events-{number}", "rb") as file:
                file.seek(self._read.get(number, 0))
                told = file.read()
            told = told[: told.rfind(b"\n") + 1]
            self._read[number] = self._read.get(number, 0) + len(told)
            for line in told.splitlines():
                kind, *words = json.loads(line)
                if kind == "report":
                    if isinstance(reason := words[0]["longrepr"], list):
                        words[0]["longrepr"] = tuple(reason)  # of a skipped test: file, line, reason
                    report = hook.pytest_report_from_serializable(config=self._config, data=words[0])
                    hook.pytest_runtest_logreport(report=report)
                else:
                    log = hook.pytest_runtest_logstart if kind == "start" else hook.pytest_runtest_logfinish
                    log(nodeid=words[0], location=tuple(words[1]))
        if session.shouldfail:
            raise session.Failed(session.shouldfail)

    def _check(self, session: pytest.Session, folder: Path, helpers: list[subprocess.Popen[bytes]]) -> None:
        """Every test has run, or the run fails."""
        missing = sorted({item.nodeid for item in session.items} - self._ended)
        ended = {number: helper.returncode for number, helper in enumerate(helpers)}
        told = [
            f"helper {number} ended with {code}; its last words:\n"
            + (folder / f"output-{number}").read_bytes()[-OUTPUT_BYTES:].decode(errors="replace")
            for number, code in ended.items()
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        ]
        if missing:
            told.append(f"{len(missing)} tests did not run: {', '.join(missing[:5])}, ...")
        if told:
            pytest.exit("\n".join(told), returncode=pytest.ExitCode.INTERNAL_ERROR)
