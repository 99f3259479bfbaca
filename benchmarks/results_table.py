"""RESULTS.md and the plots, from every `benchmarks/results/<machine>/<suite>.json`.

python -m benchmarks table            writes benchmarks/RESULTS.md and benchmarks/results/<machine>/*.png
python -m benchmarks table --check    exits with 1 if RESULTS.md is not what the files give
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import accuracy
from benchmarks.plots import plot
from benchmarks.record import Row, Scalar
from weaveopt.wording import counted

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
HEAD = """# Results

Made by `python -m benchmarks table` from `benchmarks/results/`; do not edit. Times are microseconds: the
median over iterations, and of the ranks the slowest, all columns of a row from one run. *ratio* is the best baseline
over weave: above 1, weave is faster. *bound* is the time below which no treatment of communication can go; each suite
says how it is found.
"""


EXTRAS = {
    "runs": "weave runs",
    "over_best": "over best",
    "over_bare_gemm": "over GEMM*",
    "peer_library_us": "peer library*",
    "inductor_sm_mhz": "inductor MHz*",
    "weave_sm_mhz": "weave MHz*",
    "without_collectives_sm_mhz": "without MHz*",
    "replay_us": "replay*",
    "step_over_replay": "step/replay",
    "replay_over_bytes": "replay/bytes",
    "messages_a_rank": "messages*",
    "peers_a_rank": "peers*",
    "sent_bytes_a_rank": "sent bytes*",
    "memory_bytes_a_rank": "memory bytes*",
    "earlier_run": "earlier run*",
}
"""Parameters that get a column, with its title."""
NOTES = {
    "peer_library_us": "*peer library*: FlashInfer 0.7.2, `trtllm_allreduce_fusion`, from another run on the same host "
    "(benchmarks/peer_library.py); never counted as a baseline.",
    "earlier_run": "*earlier run*: date and commit of a row that is from another run than the rest.",
    "replay_us": "*replay*: the step's captured graph back to back, without the loop around it; *bytes*: the weights, "
    "keys and values that a step reads, at the memory's rate (`benchmarks/gpu_limits.py`), which is the bound.",
    "weave_sm_mhz": "*MHz*: mean clock of the SMs while the variant repeats, of the ranks the lowest. Products that "
    "keep a GPU at its power limit run slower the less there is to wait for between them.",
    "simulated": "Simulated, not measured: `cost_model/host_simulation.py` with the links of the machine's profile. "
    "*weave* is recursive doubling, *predicted* its closed form; *messages*, *peers* (connections), *sent bytes* and "
    "*memory bytes* are of the busiest rank, in one call.",
    "over_bare_gemm": "*over GEMM*: weave's time over that of cuBLAS alone, in the same run.",
    "over_best": "*over best*: the time with so many CTAs over that with the best number.",
}


@dataclass(frozen=True)
class Suite:
    name: str
    machine: str
    host: str
    date: str
    commit: str
    versions: dict[str, str]
    rows: tuple[Row, ...]


def read(path: Path) -> Suite:
    """One result file; a missing field is an error that names the file."""
    data = json.loads(path.read_text())
    try:
        rows = tuple(
            Row(
                case=row["case"],
                weave_us=row["weave_us"],
                baselines=row["baselines"],
                best_baseline=row["best_baseline"],
                ratio=row["ratio"],
                predicted_us=row["predicted_us"],
                bound_us=row["bound_us"],
                parameters=row["parameters"],
            )
            for row in data["rows"]
        )
        parts = [data["host"].get("gpus"), data["host"]["processor"], f"{data['host']['cores']} cores"]
        host = ", ".join(part for part in parts if part)
        commit = data["commit"] or "unknown"
        return Suite(data["suite"], data["machine"], host, data["date"], commit, data["versions"], rows)
    except KeyError as missing:
        raise SystemExit(f"{path}: no field {missing}") from None


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def shown(name: str, value: Scalar | None) -> str:
    """A parameter in its column."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return number(value) if name.endswith("_us") else f"{value:.2f}"


def accuracy_table(rows: tuple[Row, ...]) -> str:
    """Predictions by kind, in Markdown: the rows themselves are in the file."""
    lines = ["| kind | cases | mean error | 90th percentile | largest |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {each.kind} | {each.cases} | {each.mean:.1%} | {each.p90:.1%} | {each.largest:.1%} |"
        for each in accuracy.errors(rows)
    ]
    return "\n".join([*lines, "", accuracy.sentence(accuracy.choices(rows))]).rstrip()


def table(suite: Suite) -> str:
    """A suite in Markdown; one column for each part of the case and each baseline that any row has."""
    if accuracy.is_accuracy(suite.rows):
        return accuracy_table(suite.rows)
    keys = list(dict.fromkeys(key for row in suite.rows for key in row.case))
    names = list(dict.fromkeys(name for row in suite.rows for name in row.baselines))
    extras = [name for name in EXTRAS if any(name in row.parameters for row in suite.rows)]
    columns = [*keys, "weave", *names, "ratio", "predicted", "bound", *(EXTRAS[name] for name in extras)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(keys) + "---:|" * (len(columns) - len(keys))]
    for row in suite.rows:
        cells = [str(row.case.get(key, "")) for key in keys]
        cells.append(number(row.weave_us))
        cells.extend(number(row.baselines.get(name)) for name in names)
        cells.extend([f"{row.ratio:.2f}", number(row.predicted_us), number(row.bound_us)])
        for name in extras:
            value = row.parameters.get(name)
            cells.append(shown(name, value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(suites: list[Suite]) -> str:
    parts = [HEAD]
    for suite in suites:
        versions = ", ".join(f"{name} {version}" for name, version in suite.versions.items())
        where = f"{suite.host}; {suite.date}, commit {suite.commit}; {versions}."
        notes = [text for name, text in NOTES.items() if any(name in row.parameters for row in suite.rows)]
        said = "".join(f"\n{text}\n" for text in notes)
        parts.append(f"## {suite.name}, {suite.machine}\n\n{where}\n\n{table(suite)}\n{said}")
    return "\n".join(parts)


def write(only_check: bool) -> int:
    """RESULTS.md and the plots; with `only_check` returns 1 if the page is not current, and writes nothing."""
    paths = sorted(HERE.glob("results/*/*.json"))
    suites = [read(path) for path in paths]
    text = page(suites)
    if only_check:
        current = RESULTS.read_text() if RESULTS.exists() else ""
        if current != text:
            print(f"{RESULTS} is not what the result files give: run python -m benchmarks table", file=sys.stderr)
        return int(current != text)
    RESULTS.write_text(text)
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{RESULTS}: {counted(len(suites), 'suite')}; no plots without matplotlib (pip install matplotlib)")
        return 0
    for path, suite in zip(paths, suites, strict=True):
        plot(f"{suite.name}, {suite.machine}", suite.rows, path.with_suffix(".png"))
    print(f"{RESULTS}: {counted(len(suites), 'suite')}, {counted(sum(len(suite.rows) for suite in suites), 'row')}")
    return 0
