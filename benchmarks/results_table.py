"""RESULTS.md and the plots, from every `benchmarks/results/<machine>/<suite>.json`.

python -m benchmarks.results_table            writes benchmarks/RESULTS.md and benchmarks/results/<machine>/*.png
python -m benchmarks.results_table --check    exits with 1 if RESULTS.md is not what the files give
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import Row

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
HEAD = """# Results

Made by `python -m benchmarks.results_table` from `benchmarks/results/`; do not edit. Times are microseconds: the
median over iterations, and of the ranks the slowest, all columns of a row from one run. *ratio* is the best baseline
over weave: above 1, weave is faster. *bound* is the time below which no treatment of communication can go; each suite
says how it is found.
"""


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
        host = f"{data['host']['processor']}, {data['host']['cores']} cores"
        commit = data["commit"] or "unknown"
        return Suite(data["suite"], data["machine"], host, data["date"], commit, data["versions"], rows)
    except KeyError as missing:
        raise SystemExit(f"{path}: no field {missing}") from None


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def table(suite: Suite) -> str:
    """A suite in Markdown; one column for each part of the case and each baseline that any row has."""
    keys = list(dict.fromkeys(key for row in suite.rows for key in row.case))
    names = list(dict.fromkeys(name for row in suite.rows for name in row.baselines))
    columns = [*keys, "weave", *names, "ratio", "predicted", "bound"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(keys) + "---:|" * (len(columns) - len(keys))]
    for row in suite.rows:
        cells = [str(row.case.get(key, "")) for key in keys]
        cells.append(number(row.weave_us))
        cells.extend(number(row.baselines.get(name)) for name in names)
        cells.extend([f"{row.ratio:.2f}", number(row.predicted_us), number(row.bound_us)])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(suites: list[Suite]) -> str:
    parts = [HEAD]
    for suite in suites:
        versions = ", ".join(f"{name} {version}" for name, version in suite.versions.items())
        where = f"{suite.host}; {suite.date}, commit {suite.commit}; {versions}."
        parts.append(f"## {suite.name}, {suite.machine}\n\n{where}\n\n{table(suite)}\n")
    return "\n".join(parts)


def label(row: Row) -> str:
    return " ".join(str(value) for value in row.case.values())


def plot(suite: Suite, path: Path) -> None:
    """The speed of weave over its best baseline, one bar a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.28 * len(suite.rows)), layout="constrained")
    labels = [label(row) for row in suite.rows]
    bars = axes.barh(labels, [row.ratio for row in suite.rows], color="#3b6ea5")
    axes.bar_label(bars, labels=[f"{row.ratio:.2f}x {row.best_baseline}" for row in suite.rows], padding=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_title(f"{suite.name}, {suite.machine}: best baseline / weave")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    paths = sorted(HERE.glob("results/*/*.json"))
    suites = [read(path) for path in paths]
    text = page(suites)
    if args.check:
        current = RESULTS.read_text() if RESULTS.exists() else ""
        if current != text:
            print(
                f"{RESULTS} is not what the result files give: run python -m benchmarks.results_table", file=sys.stderr
            )
        return int(current != text)
    RESULTS.write_text(text)
    for path, suite in zip(paths, suites, strict=True):
        plot(suite, path.with_suffix(".png"))
    print(f"{RESULTS}: {len(suites)} suite(s), {sum(len(suite.rows) for suite in suites)} row(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
