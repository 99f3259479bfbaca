"""The `weaveopt` command. Exit codes: 0 done, 1 `doctor` found nothing usable, 2 misuse, 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from weaveopt.cli import calibrate, doctor, explain, question
from weaveopt.errors import WeaveError

MISUSE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSE, f"weaveopt: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    root = _Parser(
        prog="weaveopt", description="Says what torch.compile(model, backend='weave') does to a model, and why."
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    question.add_arguments(
        commands.add_parser("explain", help="what would be rewritten in a model, without weights, GPUs or peers")
    )
    calibrate.add_arguments(
        commands.add_parser("calibrate", help="measures this machine's ranks and writes a profile for --machine")
    )
    doctor.add_arguments(commands.add_parser("doctor", help="what this host has, and what to do about what is missing"))
    return root


def _run(command: str, args: argparse.Namespace) -> int:
    if command == "explain":
        return explain.run(question.question(args))
    if command == "calibrate":
        return calibrate.run(calibrate.question(args))
    return doctor.run(args.format)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Never shows a traceback for a `WeaveError`."""
    try:
        args = parser().parse_args(argv)
        command = args.command
        del args.command
        code = _run(command, args)
        sys.stdout.flush()  # here, where a reader that went away is caught, and not at exit
        return code
    except WeaveError as error:
        print(f"weaveopt: error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSE
    except SystemExit as stop:  # argparse: --help and errors
        return stop.code if isinstance(stop.code, int) else MISUSE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away; what is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
