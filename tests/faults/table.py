"""`python -m tests.faults.table`: runs every fault and writes what was measured into docs/faults.md."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.faults.case import MEETINGS, Case, Mode, Moment, Outcome
from tests.faults.chosen import every_fault
from tests.faults.faults import COMPILED, FAULTS, Expected
from tests.faults.judge import complaints, waited_s
from tests.faults.pool import Pool
from tests.faults.sayings import Saying

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = """| fault | how it is injected | when | what the others say | after | what the rank itself does | left behind |
|---|---|---|---|---|---|---|
"""

Run = tuple[Case, Outcome]


def rows_start(fault: str) -> str:
    return f"| {fault} |"


def rows(runs: Iterable[Run]) -> str:
    """One row for the moments of a fault at which the same follows."""
    groups: dict[tuple[str, Expected, bool], list[Run]] = {}
    for case, outcome in runs:
        expected = FAULTS[case.fault].expect(case)
        groups.setdefault((case.fault, expected, case.store_on_rank), []).append((case, outcome))
    names = list(FAULTS)
    seen: set[str] = set()
    text = HEAD
    for (fault, expected, _), found in sorted(groups.items(), key=lambda item: names.index(item[0][0])):
        how = "as above" if fault in seen else FAULTS[fault].how
        seen.add(fault)
        others = {said for case, outcome in found for said in _said(case, outcome, others=True)}
        itself = {said for case, outcome in found for said in _said(case, outcome, others=False)}
        left = {each for _, outcome in found for each in outcome.left}
        cells = (
            fault, how, _when(found), _texts(others), _after(found, expected), _texts(itself),
            ", ".join(sorted(left)) or "nothing",
        )  # fmt: skip
        text += f"| {' | '.join(cells)} |\n"
    return text


def _when(found: list[Run]) -> str:
    moments = [moment for moment in Moment if any(case.moment is moment for case, _ in found)]
    modes = {case.mode for case, _ in found}
    text = "; ".join(moments)
    if found[0][0].store_on_rank:
        return f"{text} (it has the store)"
    if modes <= {*COMPILED}:
        return f"{text} (compiled)"
    if modes == {Mode.EAGER} and any(mode in FAULTS[found[0][0].fault].modes for mode in COMPILED):
        return f"{text} (the operator itself)" if moments == [Moment.AGREED] else text
    return text + (" (groups of two)" if modes == {Mode.PAIRS} else "")


def _said(case: Case, outcome: Outcome, others: bool) -> Iterable[str]:
    for rank, ended in enumerate(outcome.ranks):
        if (rank != case.victim) != others:
            continue
        is_ours = others or FAULTS[case.fault].expect(case).victim is not None
        if not is_ours or ended.said is None:
            yield "stays stopped" if ended.code is None else f"ends, code {ended.code}"
            continue
        for saying in Saying:
            if saying.matches(ended.said.error, case, rank):
                yield saying.phrase
                break


def _texts(phrases: Iterable[str]) -> str:
    return "; ".join(sorted(phrases)) or "–"


def _after(found: list[Run], expected: Expected) -> str:
    """The longest that anybody but the rank itself waited, beyond the timeout where there is one."""
    beyond, has_error = 0.0, False
    for case, outcome in found:
        for rank, ended in enumerate(outcome.ranks):
            if ended.said is None or not ended.said.error or (rank == case.victim and expected.victim is None):
                continue
            if rank == case.victim and FAULTS[case.fault].stops_until_told:
                continue
            has_error = True
            beyond = max(beyond, waited_s(ended.said, outcome))
    if not has_error:
        return "–"
    if not expected.waits_s:
        return f"{beyond:.1f} s at most" if beyond >= 0.1 else "less than 0.1 s"
    case = found[0][0]
    at_meeting = case.moment in MEETINGS
    name, timeout = ("compile_timeout_s", case.compile_timeout_s) if at_meeting else ("timeout_s", case.timeout_s)
    return f"`{name}` + {max(beyond - timeout, 0.0):.1f} s at most" if beyond > timeout else f"{beyond:.1f} s at most"


def main() -> None:
    pool = Pool()
    runs = list(pool.run(list(every_fault())))
    wrong = [f"{case.name}: {text}" for case, outcome in runs for text in complaints(case, outcome)]
    wrong += [f"left: {each}" for each in pool.close()]
    if wrong:
        raise SystemExit("\n".join(wrong))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True
    ).stdout
    note = f"Measured on commit {commit.strip()}, {len(runs)} cases, {os.cpu_count()} cores.\n\n"
    PAGE.write_text(f"{before}{BEGIN}\n{note}{rows(runs)}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
