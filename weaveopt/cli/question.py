"""The command line of `weaveopt explain`: its options, typed, and what cannot be meant."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path

from weaveopt.errors import OptionError

DEFAULT_MACHINE = "h100x8"
DEFAULT_SEQ = 2048
PICTURES = ("png", "svg")
ALL_LAYERS = "all"
FORMATS = ("table", "json", "trace", *PICTURES)


@dataclass(frozen=True)
class ExplainArguments:
    """The parsed command line. None stands for "not given"."""

    model: str | None
    tp: int | None
    ep: int | None
    nodes: int | None
    machine: str | None
    batch: int | None
    seq: int | None
    tokens: int | None
    phase: str | None
    layers: int | str | None
    """A number, or `all`."""
    full: bool
    all_logits: bool
    dtype: str | None
    disable: tuple[str, ...]
    skew: str | None
    own_batches: bool
    """True if every rank has its own batch, and attention is replicated."""
    independent: bool
    imbalance: float | None
    why: str | None
    compare: tuple[Path, Path] | None
    format: str | None
    output: Path | None

    @property
    def shows_all(self) -> bool:
        """True if what would change a choice is shown; asking takes as long as all the rest."""
        return self.full or self.why is not None or self.form == "json"

    @property
    def form(self) -> str:
        """The format asked for; else a picture's, if the output is named like one; else the table."""
        suffix = "" if self.output is None else self.output.suffix.removeprefix(".").lower()
        return self.format or (suffix if suffix in PICTURES else "table")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from weaveopt import presets

    known = ", ".join(presets.names())
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"directory, config.json, hub id, or preset: {known}")
    parser.add_argument(
        "--tp",
        type=int,
        metavar="N",
        help="tensor-parallel ranks (default: what the machine and the model's plan allow)",
    )
    parser.add_argument("--ep", type=int, metavar="N", help="expert-parallel ranks")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="hosts that the ranks are spread over (default: as few as hold them)"
    )
    parser.add_argument(
        "--machine", metavar="NAME|FILE", help=f"profile to predict with (default: $WEAVE_MACHINE or {DEFAULT_MACHINE})"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences in one forward pass (default 1)")
    parser.add_argument(
        "--seq",
        type=int,
        metavar="S",
        help=f"prompt length, or cache positions for decode (default {DEFAULT_SEQ}, or what the model has if less)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="tokens in one forward pass, in place of --batch and --seq"
    )
    parser.add_argument("--phase", choices=("prefill", "decode"), help="default: prefill")
    parser.add_argument(
        "--all-logits", action="store_true", help="prefill computes logits of all positions, not of the last alone"
    )
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="L|all",
        help="capture the first L layers and count only those; all: capture every layer, not one of each kind",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16")
    parser.add_argument(
        "--disable", action="append", default=[], metavar="RULE", help="rule that may not be used (may be repeated)"
    )
    parser.add_argument(
        "--skew",
        metavar="ROWS:EXPERTS",
        help="share of the rows of mixtures that a share of their experts gets, such as 0.5:0.125 (default: uniform)",
    )
    parser.add_argument(
        "--own-batches",
        action="store_true",
        help="with --ep: every rank has a batch of its own, as weaveopt.DataParallelExperts places experts",
    )
    parser.add_argument(
        "--independent", action="store_true", help="with --own-batches: ranks do not call the model together"
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        metavar="CV",
        help="with --own-batches: coefficient of variation of tokens between ranks (default 0)",
    )
    parser.add_argument(
        "--full", action="store_true", help="the whole report: every reason, what would change a choice, the arena"
    )
    parser.add_argument("--why", metavar="SITE", help="everything on one site, by id or module")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="in place of MODEL: two reports written by --format json, side by side",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="table (default), json, trace (a Chrome trace, for Perfetto), or a picture of the timeline, which needs "
        "--output and matplotlib",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write there, not to standard output; .png and .svg: a picture",
    )


def _layers(text: str) -> int | str:
    if text != ALL_LAYERS and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, or {ALL_LAYERS}")
    return text if text == ALL_LAYERS else int(text)


def question(args: argparse.Namespace) -> ExplainArguments:
    """The arguments, typed. Raises `OptionError` for a combination that cannot be meant."""
    asked = ExplainArguments(
        **{
            **vars(args),
            "disable": tuple(word for text in args.disable for word in text.replace(",", " ").split()),
            "compare": None if args.compare is None else tuple(args.compare),
        }
    )
    if asked.compare is None:
        _check_model(asked)
    else:
        _check_comparison(asked)
    if asked.output is not None and not os.path.isdir(asked.output.absolute().parent):
        raise OptionError(f"--output {asked.output}: no directory {asked.output.absolute().parent}")
    if asked.output is not None and os.path.isdir(asked.output):
        raise OptionError(f"--output {asked.output}: is a directory")
    return asked


def _check_comparison(asked: ExplainArguments) -> None:
    independent = ("compare", "format", "output", "model")
    given = [
        f"--{field.name}" for field in fields(asked) if field.name not in independent and getattr(asked, field.name)
    ]
    if asked.model is not None or given:
        words = "MODEL" if asked.model is not None else ", ".join(given)
        raise OptionError(f"--compare reads two reports and captures nothing: it cannot go with {words}")
    if asked.form != "table":
        raise OptionError(f"--compare prints a table: it cannot go with {_form_words(asked)}")


def _check_model(asked: ExplainArguments) -> None:
    if asked.model is None:
        raise OptionError("give a MODEL (a preset, config.json, directory or hub id), or --compare A.json B.json")
    if asked.tokens is not None and asked.phase != "decode" and (asked.batch is not None or asked.seq is not None):
        raise OptionError("--tokens stands for --batch and --seq: give one or the other")
    if asked.tokens is not None and asked.batch is not None:
        raise OptionError("--tokens stands for --batch in decode: give one or the other")
    if asked.why is not None and asked.form != "table":
        raise OptionError(f"--why prints text: it cannot go with {_form_words(asked)}")
    if asked.full and (asked.why is not None or asked.form != "table"):
        words = "--why SITE" if asked.why is not None else _form_words(asked)
        raise OptionError(f"--full prints the whole report: it cannot go with {words} (--layers all: every layer)")
    if asked.own_batches and (asked.ep is None or asked.tp is not None):
        raise OptionError("--own-batches is of expert-parallel ranks with attention replicated: give --ep N, no --tp")
    if not asked.own_batches and (asked.independent or asked.imbalance is not None):
        word = "--independent" if asked.independent else "--imbalance"
        raise OptionError(f"{word} is of ranks that hold batches of their own: give --own-batches too")
    if asked.all_logits and asked.phase == "decode":
        raise OptionError("--all-logits is of prefill: decode has one position a sequence")
    if asked.form in PICTURES:
        _check_picture(asked)
    for name in ("tp", "ep", "nodes", "batch", "seq", "tokens", "layers"):
        value = getattr(asked, name)
        if isinstance(value, int) and value < 1:
            raise OptionError(f"--{name} {value}: expected at least 1")


def _check_picture(asked: ExplainArguments) -> None:
    if asked.output is None:
        raise OptionError(f"--format {asked.form} writes a file: give --output FILE.{asked.form}")
    suffix = asked.output.suffix.removeprefix(".").lower()
    if suffix in PICTURES and suffix != asked.form:
        raise OptionError(f"--format {asked.form} and --output {asked.output}: which of the two is meant?")


def _form_words(asked: ExplainArguments) -> str:
    return f"--format {asked.form}" if asked.format else f"--output {asked.output}"
