"""`python -m tests.hosts.table`: runs every fault between hosts and writes what was measured into docs/faults.md."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.hosts.fault_ranks import Said
from tests.hosts.faults import FAULTS, MEETING_S, SHORT_S
from tests.hosts.judge import Outcome, complaints, outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- between hosts: begin -->", "<!-- between hosts: end -->"
HEAD = """| fault | how it is injected | when | hosts × ranks | what the others say | after | what the host itself does | after |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def rows_start(fault: str) -> str:
    return f"| {fault} |"


def rows(found: Iterable[Outcome]) -> str:
    text = HEAD
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in found:
        by_fault.setdefault(outcome.case.fault, []).append(outcome)
    for name, runs in by_fault.items():
        fault = FAULTS[name]
        shapes = ", ".join(f"{run.case.hosts} × {run.case.ranks_per_host}" for run in runs)
        cells = [name, fault.how, fault.moment, shapes]
        for of_host in (False, True):
            if of_host and fault.itself is None:
                cells += ["killed", "–"]
                continue
            told = [
                (said, run.waited_s(rank))
                for run in runs
                for rank, said in enumerate(run.said)
                if said is not None and run.case.is_struck(rank) == of_host
            ]
            cells += [_phrases(name, of_host, told), _after(told)]
        text += f"| {' | '.join(cells)} |\n"
    return text


def _phrases(name: str, of_host: bool, told: list[tuple[Said, float]]) -> str:
    allowed = FAULTS[name].itself if of_host else FAULTS[name].others
    found = set()
    for said, _ in told:
        found |= {saying.phrase for saying in allowed or () if any(saying.matches(said.error, r) for r in range(16))}
    return "; ".join(sorted(found))


def _after(told: list[tuple[Said, float]]) -> str:
    waited = [seconds for said, seconds in told if said.error]
    return f"{max(waited):.1f} s at most" if waited else "–"


def main() -> None:
    found, wrong = [], []
    for outcome in outcomes(FAULTS, at_once=1):
        found.append(outcome)
        wrong += [f"{outcome.case.fault}: {text}" for text in complaints(outcome)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    note = textwrap.fill(
        f"Measured on commit {commit.strip()}, {len(found)} cases one after the other, {os.cpu_count()} cores; "
        f"timeouts of {SHORT_S:g} s (`timeout_s`) and {MEETING_S:g} s (of reserving and connecting) where somebody has "
        "to wait for them.",
        width=120,
    )
    PAGE.write_text(f"{before}{BEGIN}\n{note}\n\n{rows(found)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
