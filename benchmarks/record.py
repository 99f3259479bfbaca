"""The result files that all suites write: `benchmarks/results/<machine>/<suite>.json`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.suite import UsageError
from weaveopt.wording import counted

Scalar = bool | int | float | str
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "weaveopt")
MOST_LISTED = 40


@dataclass(frozen=True)
class Row:
    """One case: our time beside the baselines' from the same run. All times in microseconds."""

    case: dict[str, Scalar]
    weave_us: float
    baselines: dict[str, float]
    best_baseline: str
    ratio: float
    """Best baseline's time over ours: above 1 we are faster."""
    predicted_us: float | None
    """Time that the cost model predicts."""
    bound_us: float | None
    """Time below which the hardware does not allow."""
    parameters: dict[str, Scalar]


def row(
    *,
    case: Mapping[str, Scalar],
    weave_us: float,
    baselines: Mapping[str, float],
    predicted_us: float | None = None,
    bound_us: float | None = None,
    parameters: Mapping[str, Scalar] | None = None,
) -> Row:
    """A row; finds the best baseline."""
    best = min(baselines, key=lambda name: baselines[name])
    return Row(
        case=dict(case),
        weave_us=round(weave_us, 3),
        baselines={name: round(us, 3) for name, us in baselines.items()},
        best_baseline=best,
        ratio=round(baselines[best] / weave_us, 3),
        predicted_us=None if predicted_us is None else round(predicted_us, 3),
        bound_us=None if bound_us is None else round(bound_us, 3),
        parameters=dict(parameters or {}),
    )


def save(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows by themselves: the ranks of one world to those of the next."""
    path.write_text(json.dumps([asdict(entry) for entry in rows]))


def load(path: Path) -> list[Row]:
    """Rows that `save` wrote; none before it did."""
    return [Row(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def line(found: Row) -> str:
    """One row on one line."""
    words = " ".join(f"{name}={value}" for name, value in found.case.items())
    others = ", ".join(f"{name} {us:.1f}" for name, us in found.baselines.items())
    limits = "".join(
        f", {name} {us:.1f}" for name, us in (("predicted", found.predicted_us), ("bound", found.bound_us)) if us
    )
    more = ", ".join(f"{name} {value}" for name, value in found.parameters.items())
    return f"{words}: weave {found.weave_us:.1f} us | {others} | {found.ratio:.3f}x{limits}" + (
        f" | {more}" * bool(more)
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns of plain text."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]]
    return "\n".join([title, *lines])


def summary(title: str, rows: Sequence[Row]) -> str:
    """Short table of rows, and the least ratio of all; of many rows the 40 with the least ratios."""
    listed = rows if len(rows) <= MOST_LISTED else sorted(rows, key=lambda found: found.ratio)[:MOST_LISTED]
    keys = list(dict.fromkeys(key for found in listed for key in found.case))
    columns = [*keys, "weave us", "best baseline", "us", "ratio", "predicted", "bound"]

    def number(us: float | None) -> str:
        return "" if us is None else f"{us:.1f}"

    lines = [
        [
            *(str(found.case.get(key, "")) for key in keys), number(found.weave_us), found.best_baseline,
            number(found.baselines[found.best_baseline]), f"{found.ratio:.3f}", number(found.predicted_us),
            number(found.bound_us),
        ]
        for found in listed
    ]  # fmt: skip
    least = min(found.ratio for found in rows)
    return f"{table(title, columns, lines)}\n{counted(len(rows), 'row')}, least ratio {least:.3f}"


def check_card(suite: str, machine: str) -> None:
    """Raises `UsageError` where the suite's result file is of other GPUs than this host's."""
    path = RESULTS / machine / f"{suite}.json"
    if path.exists():
        _kept(path, [], _gpus())


def write(suite: str, machine: str, rows: Sequence[Row], beside: bool = False) -> Path:
    """Writes the suite's result file and returns its path.

    `beside`: rows of the present file whose cases `rows` does not have stay; each says when it was measured. Raises
    `UsageError` where that file is of other GPUs, as no file has rows of two.
    """
    from weaveopt.autotune.device_class import processor_name  # it loads torch, which reading files does without

    path = RESULTS / machine / f"{suite}.json"
    host = {"processor": processor_name(), "cores": len(os.sched_getaffinity(0)), **_gpus()}
    kept = _kept(path, rows, host) if beside and path.exists() else []
    record = {
        "suite": suite,
        "machine": machine,
        "host": host,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "versions": _versions(),
        "rows": [*(asdict(entry) for entry in rows), *kept],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _kept(path: Path, rows: Sequence[Row], host: Mapping[str, Scalar]) -> list[dict[str, object]]:
    before = json.loads(path.read_text())
    then, now = _card(before["host"]), _card(host)
    if then != now:
        raise UsageError(f"{path} has rows of {then}, and this is {now}: name another --machine")
    again = [dict(row.case) for row in rows]
    kept = [row for row in before["rows"] if row["case"] not in again]
    for row in kept:
        row["parameters"].setdefault("earlier_run", f"{before['date']}, {str(before['commit'])[:7]}")
    return kept


def _card(host: Mapping[str, Scalar]) -> str:
    """Its GPUs, however many: "2 x NVIDIA H200" and "1 x NVIDIA H200" are one."""
    return str(host.get("gpus", "no GPU")).rpartition(" x ")[2]


def rewrite(path: Path, rows: list[Row]) -> Path:
    """Other rows in a result file; where and when they were measured stays what it says."""
    record = json.loads(path.read_text())
    record["rows"] = [asdict(entry) for entry in rows]
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _commit() -> str | None:
    """The commit that was measured: what `BENCHMARK_COMMIT` says, else git's, with `+` where the working tree differs.

    GPU hosts get a copy of the sources, whose history may be missing or older: who made the copy knows the commit.
    """
    known = os.environ.get("BENCHMARK_COMMIT")
    if known:
        return known
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", ":(top,exclude)benchmarks/results"],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions | _cuda_versions()


def _cuda_versions() -> dict[str, str]:
    """Versions of what runs on the GPUs; empty without any."""
    import torch

    if not torch.cuda.is_available():
        return {}
    found = {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ..."
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return found
    driver = next((word for word in words if word[0].isdigit() and "." in word), None)
    return found if driver is None else {**found, "driver": driver}


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"}
