"""The `weaveopt` command. Exit codes: 0 done, 1 `doctor` found nothing usable, 2 misuse, 130 interrupted."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import NoReturn

import weaveopt
from weaveopt.cli import calibrate, doctor, explain, question, tuned
from weaveopt.errors import OptionError, WeaveError

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
    root.add_argument("--version", action="version", version=f"weaveopt {weaveopt.__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    question.add_arguments(
        commands.add_parser("explain", help="what would be rewritten in a model, without weights, GPUs or peers")
    )
    calibrate.add_arguments(
        commands.add_parser("calibrate", help="measures this machine's ranks and writes a profile for --machine")
    )
    doctor.add_arguments(commands.add_parser("doctor", help="what this host has, and what to do about what is missing"))
    tuned.add_arguments(
        commands.add_parser("tuned", help="local kernels whose times compiles left on disk, and how to wipe them")
    )
    return root


def _run(argv: Sequence[str] | None) -> int:
    root = parser()
    try:
        args = root.parse_args(argv)
    except SystemExit as stop:  # --help and errors
        return stop.code if isinstance(stop.code, int) else MISUSE
    command = args.command
    del args.command
    _refuse_empty(args)
    if command is None:
        root.print_help()
        return 0
    if command == "explain":
        return explain.run(question.question(args))
    if command == "calibrate":
        return calibrate.run(calibrate.question(args))
    if command == "tuned":
        return tuned.run(args.cache, args.wipe)
    return doctor.run(args.format)


def _refuse_empty(args: argparse.Namespace) -> None:
    """Raises `OptionError` for an argument that is empty, as that of a shell's variable which is not set is: to take it
    as not given would answer another question, or wipe another folder."""
    for name, value in vars(args).items():
        if any(isinstance(each, str) and not each.strip() for each in (value if isinstance(value, list) else [value])):
            raise OptionError(f"{'MODEL' if name == 'model' else f'--{name}'}: empty, expected a value")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Misuse and what the system refuses are one line, no traceback."""
    with _streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()  # here, where a reader that went away or a full disk is caught, and not at exit
        return code
    except WeaveError as error:
        print(f"weaveopt: error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISUSE
    except ImportError as error:  # a package that is missing, or too old
        print(f"weaveopt: error: {' '.join(str(error).split())[:300]} (see weaveopt doctor)", file=sys.stderr)
        return MISUSE
    except UnicodeDecodeError as error:  # torch reads files of its own by the locale's encoding
        print(f"weaveopt: error: torch's files cannot be read as {error.encoding}: set PYTHONUTF8=1", file=sys.stderr)
        return MISUSE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:  # of the system, not of the question: a full disk, a working directory that is gone
        _drop_output()
        print(f"weaveopt: error: {_words(error)}", file=sys.stderr)
        return MISUSE


def _words(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return " ".join(f"{where}{error.strerror or error or type(error).__name__}".split())


@contextmanager
def _streams() -> Iterator[None]:
    """Standard streams that take every word: a closed one (`>&-`) swallows it, and an encoding that lacks a sign of
    the report, such as `×`, gets a question mark for it."""
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context({"stdout": redirect_stdout, "stderr": redirect_stderr}[name](nowhere))
            elif isinstance(stream := getattr(sys, name), io.TextIOWrapper) and stream.errors == "strict":
                stream.reconfigure(errors="replace")
        yield


def _drop_output() -> None:
    """Redirect stdout to the null device, so that buffered output does not raise again at exit."""
    with suppress(io.UnsupportedOperation):  # a stream in memory
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
