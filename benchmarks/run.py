"""Lists suites and runs them: launches or joins ranks, measures, writes result files, and prints a short table.

Figures go to `benchmarks/results/<machine>/<suite>.json` after every row. Steps of a case take turns in a random order
of each round (benchmarks/timing.py); a time is the median, and of the ranks the largest. With `--quick`, suites have
few small cases and few rounds, and nothing is written.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import ranks, record, suites
from benchmarks.ranks import Place
from benchmarks.suite import CPU, GPU, Asked, Case, Suite, UsageError, selected
from weaveopt.wording import counted

ROWS = "BENCHMARK_ROWS"
"""Environment variable: file with the rows that ranks of this run have measured already."""


@dataclass(frozen=True)
class Run:
    """One command line of `run`."""

    names: tuple[str, ...]
    asked: Asked
    device: str
    """Chooses between two suites of one name, and the suites of `--all`."""
    filters: tuple[str, ...] = ()
    worlds: tuple[int, ...] = ()
    """Numbers of ranks instead of the suite's."""
    writes: bool = True

    def words(self, name: str) -> list[str]:
        """The command line of a rank of suite `name`."""
        given = [f"--case={text}" for text in self.filters]
        given += [f"--set={each}={value}" for each, value in self.asked.values.items()]
        given += ["--quick"] * self.asked.quick + ["--no-write"] * (not self.writes)
        return ["run", name, "--machine", self.asked.machine, "--device", self.device, *given]


@cache
def every_suite() -> tuple[Suite[Case], ...]:
    """All suites of `benchmarks/suites/`, by name."""
    found: list[Suite[Case]] = []
    for module in pkgutil.iter_modules(suites.__path__):
        found += importlib.import_module(f"{suites.__name__}.{module.name}").SUITES
    return tuple(sorted(found, key=lambda suite: (suite.name, suite.needs.device)))


def suite_named(name: str, device: str) -> Suite[Case]:
    """The suite for this device, or the only one of that name. Raises `UsageError`."""
    found = [suite for suite in every_suite() if suite.name == name]
    if not found:
        names = dict.fromkeys(suite.name for suite in every_suite())
        raise UsageError(f"found suite {name!r}, expected one of {', '.join(names)}")
    return next((suite for suite in found if suite.needs.device == device), found[0])


def default_device() -> str:
    return GPU if torch.cuda.is_available() else CPU


def cases_of(suite: Suite[Case], run: Run) -> list[Case]:
    """Cases to measure. Raises `UsageError` where a setting or filter does not fit."""
    if unknown := set(run.asked.values) - {setting.name for setting in suite.settings}:
        known = ", ".join(setting.name for setting in suite.settings) or "none"
        raise UsageError(f"{suite.name} has no setting {min(unknown)}: its settings are {known}")
    for setting in suite.settings:
        run.asked.of(setting)
    cases = selected(suite.cases(run.asked), run.filters)
    if not cases:
        raise UsageError(f"{suite.name} has no case {' or '.join(map(repr, run.filters)) or 'at all'}")
    return cases


def measured(place: Place, suite: Suite[Case], cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    """Rows of a suite, on every rank; rank 0 prints each."""
    torch.manual_seed(0)
    if place.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=place.device))  # NCCL connects now, not in a first measurement
    if suite.prepare is not None:
        suite.prepare()
    with torch.set_grad_enabled(suite.trains):
        for row in suite.rows(place, cases, asked):
            place.say(record.line(row))
            yield row


def measure(place: Place, suite: Suite[Case], run: Run, saved: Path | None) -> list[record.Row]:
    """Measures a suite and writes its file after every row, so that a run that is cut short has those it came to.

    `saved` has rows of this run by other numbers of ranks, and is given those of this one.
    """
    rows = record.load(saved) if saved is not None else []
    for row in measured(place, suite, cases_of(suite, run), run.asked):
        rows.append(row)
        if place.rank == 0:
            if saved is not None:
                record.save(saved, rows)
            if run.writes:
                record.write(suite.name, run.asked.machine, rows, beside=not suite.replaces)
    return rows


def rank_main(suite: Suite[Case], run: Run) -> None:
    """One rank that torchrun started; does not return."""
    path = os.environ.get(ROWS)

    def program(place: Place) -> None:
        rows = measure(place, suite, run, Path(path) if path else None)
        if not path:
            place.say(record.summary(suite.name, rows))

    ranks.run_and_exit(program, "cuda" if suite.needs.device == GPU else "cpu", run.asked.quick)


def run_one(suite: Suite[Case], run: Run) -> int:
    """Runs a suite with each number of ranks and prints its table; returns an exit code."""
    cases_of(suite, run)
    if run.writes and not suite.replaces:
        record.check_card(suite.name, run.asked.machine)
    with tempfile.TemporaryDirectory() as folder:
        saved, code = Path(folder) / "rows.json", 0
        for world in run.worlds or suite.needs.worlds_of(run.asked.quick):
            if world == 0:
                measure(Place(0, 1, torch.device("cpu"), quick=run.asked.quick), suite, run, saved)
                continue
            code = code or ranks.start("benchmarks", world, run.words(suite.name), {ROWS: str(saved)})
        if rows := record.load(saved):
            print(record.summary(f"\n{suite.name}, {run.asked.machine}, microseconds", rows), flush=True)
        if rows and run.writes:
            print(record.RESULTS / run.asked.machine / f"{suite.name}.json")
    return code


def run_all(run: Run) -> int:
    """All suites of the device that this host can run; lists the others, and how each ended."""
    told: list[list[str]] = []
    code = 0
    for suite in every_suite():
        if suite.by_name_only:
            continue
        lack = suite.needs.lack(run.asked.machine)
        if not lack and suite.needs.device != run.device:
            lack = f"--device {suite.needs.device}"
        if lack:
            told.append([suite.name, suite.needs.device, f"not run: needs {lack}"])
            continue
        print(f"\n== {suite.name}: {suite.about}", flush=True)
        begin = time.perf_counter()
        try:
            failed = run_one(suite, run)
        except (UsageError, RuntimeError, AssertionError) as error:
            print(f"{suite.name}: {error}", file=sys.stderr)
            failed = 1
        code = code or failed
        seconds = time.perf_counter() - begin
        told.append([suite.name, suite.needs.device, f"{'failed' if failed else 'done'} in {seconds:.0f} s"])
    print(record.table("\nall suites", ["suite", "device", "outcome"], told))
    return code


def run(asked: Run) -> int:
    """Runs what a command line asks for. Raises `UsageError`."""
    if not asked.names:
        return run_all(asked)
    chosen = [suite_named(name, asked.device) for name in asked.names]
    if dist.is_torchelastic_launched():
        rank_main(chosen[0], asked)
    for suite in chosen:
        if lack := suite.needs.lack(asked.asked.machine):
            raise UsageError(f"{suite.name} needs {lack}")
        most = torch.cuda.device_count()
        if asked.worlds and (0 in suite.needs.worlds or min(asked.worlds) < suite.needs.ranks):
            raise UsageError(f"{suite.name} cannot run with {counted(min(asked.worlds), 'rank')}: needs {suite.needs}")
        if suite.needs.device == GPU and max(asked.worlds, default=0) > most:
            raise UsageError(f"--ranks {max(asked.worlds)}: found {counted(most, 'GPU')}")
        cases_of(suite, asked)
    return max(run_one(suite, asked) for suite in chosen)


def listing() -> str:
    """Every suite, with what it needs, its cases and its settings."""
    lines = []
    for suite in every_suite():
        cases = suite.cases(Asked(suite.needs.machines[0] if suite.needs.machines else "h200x4"))
        apart = "; by name only" if suite.by_name_only else ""
        lines.append(f"{suite.name} ({suite.needs}; {counted(len(cases), 'case')}{apart}): {suite.about}")
        lines.append(f"    weave: {', '.join(suite.ours)}; baselines: {', '.join(suite.baselines)}")
        lines += [
            f"    {name}: {text}" for name, text in (("predicted", suite.predicted), ("bound", suite.bound)) if text
        ]
        for setting in suite.settings:
            default = setting.default
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            lines.append(f"    --set {setting.name}={shown}  {setting.about}".rstrip())
    return "\n".join(lines)
