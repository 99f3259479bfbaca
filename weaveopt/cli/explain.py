"""`weaveopt explain`: what weaveopt would do to a model on a machine, and why, without either of them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weaveopt.decision import GraphReport, Report
from weaveopt.errors import CaptureError, OptionError

if TYPE_CHECKING:
    from weaveopt.cli.model_source import Request, Source
    from weaveopt.cost_model import Machine

DEFAULT_MACHINE = "h100x8"
FORMATS = ("table", "json", "trace")
NUM_STEPS = 5


@dataclass(frozen=True)
class Question:
    """The parsed command line. None stands for "not given"."""

    model: str
    tp: int | None
    ep: int | None
    nodes: int | None
    machine: str | None
    batch: int | None
    seq: int | None
    tokens: int | None
    phase: str
    layers: int | None
    full: bool
    dtype: str
    disable: tuple[str, ...]
    why: str | None
    format: str
    output: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from weaveopt import presets

    parser.add_argument(
        "model", metavar="MODEL", help=f"directory, config.json, hub id, or preset: {', '.join(presets.names())}"
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel ranks (default: what the machine and the heads allow)"
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
        "--seq", type=int, metavar="S", help="prompt length, or cache positions for decode (default 2048)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="tokens in one forward pass, in place of --batch and --seq"
    )
    parser.add_argument("--phase", choices=("prefill", "decode"), default="prefill")
    parser.add_argument("--layers", type=int, metavar="L", help="capture the first L layers and count only those")
    parser.add_argument("--full", action="store_true", help="capture every layer instead of one of each kind")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--disable", action="append", default=[], metavar="RULE", help="rule that may not be used (may be repeated)"
    )
    parser.add_argument("--why", metavar="SITE", help="everything on one site, by id or module")
    parser.add_argument("--format", choices=FORMATS, default="table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of to standard output")


def question(args: argparse.Namespace) -> Question:
    """The arguments, typed. Raises `OptionError` for a combination that cannot be meant."""
    asked = Question(
        **{**vars(args), "disable": tuple(word for text in args.disable for word in text.replace(",", " ").split())}
    )
    if asked.tokens is not None and asked.phase == "prefill" and (asked.batch is not None or asked.seq is not None):
        raise OptionError("--tokens stands for --batch and --seq: give one or the other")
    if asked.tokens is not None and asked.batch is not None:
        raise OptionError("--tokens stands for --batch in decode: give one or the other")
    if asked.why is not None and asked.format != "table":
        raise OptionError(f"--why prints text: it cannot go with --format {asked.format}")
    if asked.full and asked.layers is not None:
        raise OptionError("--full captures every layer and --layers only some: give one or the other")
    if asked.output is not None and not asked.output.absolute().parent.is_dir():
        raise OptionError(f"--output {asked.output}: no directory {asked.output.absolute().parent}")
    for name in ("tp", "ep", "nodes", "batch", "seq", "tokens", "layers"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} {value}: expected at least 1")
    return asked


def run(asked: Question) -> int:
    """Capture, decide, print. Returns the exit code."""
    with _progress() as on_step:
        report = explain(asked, on_step)
    color = asked.output is None and sys.stdout.isatty()
    _write(_rendered(report, asked, color), asked.output)
    return 0


def explain(asked: Question, on_step: Callable[[str], None] = lambda _: None) -> Report:
    """The report of one captured forward pass. Raises a `WeaveError` for everything that is wrong with the question."""
    on_step("reading the configuration")
    from weaveopt import cost_model, rewrites
    from weaveopt.cli import layers, model_source, preview
    from weaveopt.config import resolve

    options: dict[str, str | tuple[str, ...]] = {}
    if asked.machine:
        options["machine"] = asked.machine
    if asked.disable:
        options["disable"] = asked.disable
    config = resolve(options, rules=rewrites.names())
    machine = cost_model.load(config.machine or DEFAULT_MACHINE)
    source = model_source.load(asked.model)
    request = request_of(asked, source, machine)
    model_source.check(source, request)
    sharding = preview.sharding(request)

    import weaveopt.backend
    from weaveopt.runtime import topology

    plan = preview.plan_layers(source, request)
    graphs: list[GraphReport] = []
    group = topology.fake(request.world, hosts=request.nodes, device=machine.device)
    preview.capture(source, request, plan, weaveopt.backend.preview(config, group, machine, graphs.append), on_step)
    if not graphs:
        raise CaptureError(f"{source.name}: no graph was captured")
    graphs = [replace(layers.scale(g, plan), phase=request.phase, tokens=request.tokens) for g in graphs]
    notes = (f"{sharding} on {request.nodes} host(s); {_batch(request)}", plan.describe())
    fallbacks = tuple(fallback for graph in graphs for fallback in graph.fallbacks)
    return Report(source.name, request.world, machine.summary(), tuple(graphs), fallbacks, notes)


def request_of(asked: Question, source: Source, machine: Machine) -> Request:
    """The question with its defaults filled in from the model and the machine."""
    from weaveopt.cli.model_source import Request, largest_world

    per_host = machine.ranks_per_host
    world = max(asked.tp or 0, asked.ep or 0)
    if not world:
        world = largest_world(source, per_host * (asked.nodes or 1), asked.nodes or 1)
    nodes = asked.nodes or (math.ceil(world / per_host) if machine.device == "cuda" else 1)
    if machine.device == "cuda" and world > nodes * per_host:
        raise OptionError(
            f"{world} ranks on {nodes} host(s) of {machine.name}, which has {per_host} a host: raise --nodes"
        )
    tokens_batch, tokens_seq = (1, asked.tokens) if asked.phase == "prefill" else (asked.tokens, None)
    return Request(
        model=asked.model,
        tp=asked.tp or (0 if asked.ep else world),
        ep=asked.ep or 0,
        nodes=nodes,
        batch=asked.batch or (tokens_batch if asked.tokens else None) or 1,
        seq=asked.seq or (tokens_seq if asked.tokens else None) or 2048,
        phase=asked.phase,
        layers=asked.layers,
        full=asked.full,
        dtype=asked.dtype,
    )


def _batch(request: Request) -> str:
    shape = f"{request.batch} × {request.seq}"
    return (
        f"prefill of {shape} tokens"
        if request.phase == "prefill"
        else f"decode of {request.batch} sequence(s), cache of {request.seq}"
    )


def _rendered(report: Report, asked: Question, color: bool) -> str:
    if asked.format == "json":
        from weaveopt.cli.report_json import to_json

        return to_json(report)
    if asked.format == "trace":
        from weaveopt.cli.trace import to_trace

        return to_trace(report)
    from weaveopt.cli import render, why

    width = max(os.get_terminal_size(sys.stdout.fileno()).columns, 100) if color else None
    return why.text(report, asked.why, width, color) if asked.why else render.text(report, width, color)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {output}: {error.strerror}") from error


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar over the steps on a terminal's standard error; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=NUM_STEPS)

        def on_step(name: str) -> None:
            progress.update(task, description=name, advance=1)

        yield on_step
