"""`weaveopt explain`: what weaveopt would do to a model on a machine, and why, without either of them."""

from __future__ import annotations

import ast
import gc
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weaveopt.cli.question import ALL_LAYERS, DEFAULT_MACHINE, DEFAULT_SEQ, PICTURES, ExplainArguments
from weaveopt.errors import CaptureError, OptionError, ProfileError
from weaveopt.records.report import GraphReport, Report
from weaveopt.wording import counted

if TYPE_CHECKING:
    from weaveopt.cli.model_source import CaptureRequest, Source
    from weaveopt.config import OptionValue
    from weaveopt.cost_model import Machine

NUM_STEPS = 5
RULES = "weaveopt.rewrites."
"""Prefix of the modules that hold rules."""
MORE = "more: --full, --why SITE, --format json"


def run(asked: ExplainArguments) -> int:
    """Capture, decide, print; or compare two reports. Returns the exit code."""
    if asked.compare is not None:
        from weaveopt.reporting import compare

        _write(compare.text(*asked.compare, *_console(asked)), asked.output)
        return 0
    if asked.form in PICTURES:
        from weaveopt.reporting import picture

        picture.require()
    with _few_collections(), _progress() as on_step:
        report = explain(asked, on_step)
    _write(rendered(report, asked), asked.output)
    return 0


def _console(asked: ExplainArguments) -> tuple[int, bool]:
    """Width of the text, and whether it has colors."""
    from weaveopt.reporting import terminal

    if asked.output is not None:
        return terminal.width_of(), False
    return terminal.width_of(sys.stdout), terminal.colored(sys.stdout)


def explain(asked: ExplainArguments, on_step: Callable[[str], None] = lambda _: None) -> Report:
    """The report of one captured forward pass. Raises a `WeaveError` for everything that is wrong with the question."""
    on_step("reading the configuration")
    from weaveopt import cost_model
    from weaveopt.cli import layers, model_source, preview
    from weaveopt.config import resolve

    options: dict[str, OptionValue] = {}
    if asked.machine:
        options["machine"] = asked.machine
    if asked.disable:
        options["disable"] = asked.disable
    if asked.skew:
        options["skew"] = asked.skew
    if asked.imbalance is not None:
        options["imbalance"] = asked.imbalance
    config = resolve(options, rules=rule_names())
    machine = cost_model.load(config.machine or DEFAULT_MACHINE)
    assert asked.model is not None, "a question without MODEL is a comparison"
    # First what JSON says: a number that cannot be is refused before torch is imported, which takes seconds.
    if (sketch := model_source.sketch(asked.model)) is not None:
        model_source.check(sketch, request_of(asked, sketch, machine))
    source = model_source.load(asked.model)
    request = request_of(asked, source, machine)
    model_source.check(source, request)
    if asked.own_batches:
        config = replace(config, batch_tokens=request.tokens)
    sharding = preview.sharding(source, request)

    import weaveopt.preview
    from weaveopt.fabrics import topology

    plan = preview.plan_layers(source, request)
    graphs: list[GraphReport] = []
    group = topology.fake(request.world, hosts=request.nodes, device=machine.device)
    seen = weaveopt.preview.preview(config, group, machine, graphs.append, ask_sensitivity=asked.shows_all)
    try:
        preview.capture(source, request, plan, seen, on_step)
    except ProfileError as error:  # a curve that no rule can read
        raise ProfileError(f"profile {config.machine or DEFAULT_MACHINE}: {error}") from None
    if not graphs:
        raise CaptureError(f"{source.name}: no graph was captured")
    graphs = [replace(layers.scale(g, plan), phase=request.phase, tokens=request.tokens) for g in graphs]
    notes = (f"{sharding} on {counted(request.nodes, 'host')}; {_batch(request)}", plan.describe())
    fallbacks = tuple(fallback for graph in graphs for fallback in graph.fallbacks)
    used = machine.summary((request.dtype,), request.nodes)
    return Report(source.name, request.world, used, tuple(graphs), fallbacks, notes)


def rule_names() -> tuple[str, ...]:
    """Every rule, by the imports of the file that lists them: to execute it would import torch."""
    found = importlib.util.find_spec("weaveopt.rewrites")
    assert found is not None and found.origin is not None
    statements = ast.parse(Path(found.origin).read_text(encoding="utf-8")).body
    modules = [node.module or "" for node in statements if isinstance(node, ast.ImportFrom)]
    return tuple(sorted(name.removeprefix(RULES).partition(".")[0] for name in modules if name.startswith(RULES)))


def request_of(asked: ExplainArguments, source: Source, machine: Machine) -> CaptureRequest:
    """The question with its defaults filled in from the model and the machine."""
    from weaveopt.cli.model_source import CaptureRequest, default_ranks

    per_host = machine.ranks_per_host
    tp, ep = asked.tp or 0, asked.ep or 0
    if not (tp or ep):
        tp, ep = default_ranks(source, per_host * (asked.nodes or 1), asked.nodes or 1)
    world = max(tp, ep)
    nodes = asked.nodes or (math.ceil(world / per_host) if machine.device == "cuda" else 1)
    if machine.device == "cuda" and world > nodes * per_host:
        raise OptionError(
            f"{counted(world, 'rank')} on {counted(nodes, 'host')} of {machine.name}, which has {per_host} a host: "
            "raise --nodes"
        )
    phase = asked.phase or "prefill"
    positions = getattr(source.config, "max_position_embeddings", None)  # of some models there are no more
    default_seq = min(DEFAULT_SEQ, positions) if isinstance(positions, int) and positions > 0 else DEFAULT_SEQ
    tokens_batch, tokens_seq = (1, asked.tokens) if phase == "prefill" else (asked.tokens, None)
    return CaptureRequest(
        model=asked.model or source.name,
        tp=tp,
        ep=ep,
        nodes=nodes,
        batch=asked.batch or (tokens_batch if asked.tokens else None) or 1,
        seq=asked.seq or (tokens_seq if asked.tokens else None) or default_seq,
        phase=phase,
        layers=asked.layers if isinstance(asked.layers, int) else None,
        full=asked.layers == ALL_LAYERS,
        all_logits=asked.all_logits,
        dtype=asked.dtype or "bfloat16",
        own_batches=asked.own_batches,
        independent=asked.independent,
        on_gpus=machine.device == "cuda",
    )


def _batch(request: CaptureRequest) -> str:
    if request.phase == "decode":
        return f"decode of {counted(request.batch, 'sequence')}, cache of {request.seq}"
    logits = "all" if request.all_logits else "the last"
    return f"prefill of {request.batch} × {counted(request.seq, 'token')}, logits of {logits}"


def rendered(report: Report, asked: ExplainArguments) -> str | bytes:
    if asked.form == "json":
        from weaveopt.reporting.document import to_json

        return to_json(report)
    if asked.form == "trace":
        from weaveopt.reporting.trace import to_trace

        return to_trace(report)
    if asked.form in PICTURES:
        from weaveopt.reporting import picture

        return picture.draw(report, asked.form)
    from weaveopt.reporting import screen, text, why

    if asked.why:
        return why.text(report, asked.why, *_console(asked))
    return text.text(report, *_console(asked)) if asked.full else screen.text(report, *_console(asked), more=MORE)


def _write(content: str | bytes, output: Path | None) -> None:
    if output is None:
        assert isinstance(content, str), "a picture goes to a file"
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    try:
        output.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OptionError(f"--output {output}: {error.strerror}") from error


@contextmanager
def _few_collections() -> Iterator[None]:
    """Python looks for garbage less often: what imports and tracing make stays until the end."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar over the steps on a terminal's standard error; nothing where standard error is no terminal."""
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
