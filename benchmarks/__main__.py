"""The benchmarks' only command line.

python -m benchmarks list                                       suites, with what they need and what can be set
python -m benchmarks run SUITE ... --machine M [--quick]        result files in benchmarks/results/M/, and a table
python -m benchmarks run --all --machine M [--quick]            all that this host can run
python -m benchmarks table [--check]                            RESULTS.md and the plots from all result files
python -m benchmarks predict prediction|overlap --machine M     the stored measurements predicted anew
python -m benchmarks draw TRACE ... --output PNG [--layers N]   a picture of traces that suites wrote
python -m benchmarks hidden TRACE ... [--least SHARE]           exchange time under computation, of such traces
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.suite import CPU, GPU, Asked, UsageError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="suites, what they need and what can be set")
    run = commands.add_parser("run", help="measure suites")
    run.add_argument("suites", nargs="*", metavar="SUITE")
    run.add_argument("--all", action="store_true", help="all suites of the device that this host can run")
    run.add_argument("--machine", required=True, help="folder of benchmarks/results for the figures")
    run.add_argument("--device", choices=(CPU, GPU), help="default: gpu where there is one")
    run.add_argument("--quick", action="store_true", help="few small cases and rounds; nothing is written")
    run.add_argument("--case", action="append", default=[], metavar="TEXT", help="only cases with all words of TEXT")
    run.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the suite")
    run.add_argument("--ranks", default="", help="numbers of ranks, such as 4,2, instead of the suite's")
    run.add_argument("--no-write", action="store_true", help="write no result file")
    table = commands.add_parser("table", help="RESULTS.md and the plots from all result files")
    table.add_argument("--check", action="store_true", help="write nothing; exit code 1 if RESULTS.md is not current")
    predict = commands.add_parser("predict", help="stored measurements predicted anew")
    predict.add_argument("suite", choices=("prediction", "overlap"))
    predict.add_argument("--machine", required=True, help="folder of benchmarks/results")
    predict.add_argument("--profile", default="", help="machine profile (default: MACHINE)")
    draw = commands.add_parser("draw", help="a picture of traces")
    draw.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    draw.add_argument("--output", type=Path, required=True)
    draw.add_argument("--layers", type=int, default=0, help="layers in each trace (default: calls of experts)")
    hidden = commands.add_parser("hidden", help="how much of the exchanges of traces runs under computation")
    hidden.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    hidden.add_argument("--least", type=float, default=0.0, metavar="SHARE", help="exit code 1 if less is hidden")
    return parser


def _pairs(texts: list[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise UsageError(f"--set: found {text!r}, expected NAME=VALUE")
        found[name] = value
    return found


def _run(words: argparse.Namespace) -> int:
    from benchmarks import run

    if bool(words.suites) == words.all:
        raise UsageError("run: name suites, or --all")
    worlds = words.ranks.split(",") if words.ranks else []
    if not all(world.isdigit() and int(world) for world in worlds):
        raise UsageError(f"--ranks: found {words.ranks!r}, expected numbers such as 4,2")
    if words.all and (words.case or words.set or worlds):
        raise UsageError("--all: --case, --set and --ranks are of suites that are named")
    asked = Asked(words.machine, words.quick, _pairs(words.set))
    return run.run(
        run.Run(
            tuple(words.suites), asked, words.device or run.default_device(), tuple(words.case),
            tuple(map(int, worlds)), writes=not (words.quick or words.no_write),
        )
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    try:
        words = _parser().parse_args(arguments)
        match words.command:
            case "run":
                return _run(words)
            case "list":
                from benchmarks.run import listing

                print(listing())
                return 0
            case "table":
                from benchmarks import results_table

                return results_table.write(words.check)
            case "predict":
                from benchmarks import predict

                return predict.again(words.suite, words.machine, words.profile)
            case "hidden":
                from benchmarks import traces

                return traces.print_hidden(words.traces, words.least)
            case _:
                from benchmarks import traces

                return traces.draw_files(words.traces, words.output, words.layers)
    except UsageError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
