"""Records what weaveopt decides and predicts, or holds today's against the record.

    python -m tests.golden.record            writes tests/golden/sites.json and tests/golden/prediction.json
    python -m tests.golden.record --check    prints what differs; exits with 1 where a choice does

`weaveopt explain` is asked in this process, case by case: see `tests/golden/cases.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

from tests.golden import cases, compare, predictions, store
from tests.golden.compact import Record, compact
from weaveopt.cli.main import main as weaveopt

FILE = Path(__file__).parent / "sites.json"


def explain(command_line: str, folder: Path) -> Record:
    """One case. Where it is refused: the exit code and the line that says why."""
    output, errors = folder / "report.json", io.StringIO()
    output.unlink(missing_ok=True)
    with contextlib.redirect_stderr(errors):
        code = weaveopt([*cases.words_of(command_line, folder), "--format", "json", "--output", str(output)])
    if code:
        line = errors.getvalue().strip().splitlines()[-1:]
        return {"exit": code, "error": " ".join(line).replace(str(folder), "FOLDER")}
    return {"exit": code, **compact(json.loads(output.read_text(encoding="utf-8")))}


def blocks() -> dict[str, Callable[[], Record]]:
    from tests.golden import forms

    return dict(forms.cases())


def previewed(make: Callable[[], Record]) -> Record:
    try:
        return {"exit": 0, **compact(make())}
    except Exception as error:  # kept as what the case gives, so that it shows up as a difference
        return {"exit": 1, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def record(command_lines: Iterable[str], named: dict[str, Callable[[], Record]], say: bool) -> dict[str, Record]:
    """Every case, in one process, whatever the caller's environment asks of weaveopt."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("WEAVE_")}
    found: dict[str, Record] = {}
    with mock.patch.dict(os.environ, plain, clear=True), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases.write_configs(folder)
        every: dict[str, Callable[[], Record]] = {
            line: lambda line=line: explain(line, folder) for line in command_lines
        }
        for case, make in every.items():
            found[case] = _timed(case, make, say)
        for case, make in named.items():
            found[case] = _timed(case, lambda make=make: previewed(make), say)
    return found


def _timed(case: str, make: Callable[[], Record], say: bool) -> Record:
    start = time.perf_counter()
    found = make()
    if say:
        print(f"{time.perf_counter() - start:6.1f} s  exit {found['exit']}  {case}", file=sys.stderr, flush=True)
    return found


def check(new: dict[str, Record]) -> int:
    found = compare.compare(store.read(FILE), new)
    print(found.text())
    print("(f) errors of the predictions against stored measurements")
    figures = predictions.record_all()
    for line in predictions.text(figures):
        print(f"  {line}")
    for line in predictions.changes(predictions.read(), figures) or ["no figure changed"]:
        print(f"  {line}")
    return 1 if found.of(compare.Kind.CHOICE) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing: say what differs from the record")
    parser.add_argument("--only", metavar="TEXT", help="with --check: cases whose name holds this text")
    parser.add_argument("--verbose", action="store_true", help="a line on stderr for each case")
    args = parser.parse_args()
    if args.only and not args.check:
        parser.error("--only needs --check: the record is written whole")
    lines = [line for line in cases.command_lines() if (args.only or "") in line]
    named = {name: make for name, make in blocks().items() if (args.only or "") in name}
    new = record(lines, named, args.verbose)
    if args.check:
        return check(new) if not args.only else check_some(new)
    store.write(FILE, new)
    predictions.write(predictions.record_all())
    print(f"{FILE}: {len(new)} cases, {FILE.stat().st_size / 1000:.0f} KB")
    return 0


def check_some(new: dict[str, Record]) -> int:
    """Prints the differences in these cases; returns 1 if a choice differs, and 0 if none does."""
    found = compare.compare({name: each for name, each in store.read(FILE).items() if name in new}, new)
    print(found.text())
    return 1 if found.of(compare.Kind.CHOICE) else 0


if __name__ == "__main__":
    sys.exit(main())
