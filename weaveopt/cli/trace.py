"""The predicted timeline as a Chrome trace (open it in Perfetto or chrome://tracing).

Two processes a graph, the unfused graph and the chosen one; one track a stream. Only the sites are drawn: what
lies between them is the same before and after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from weaveopt.cli.json_reader import Json
from weaveopt.decision import Decision, Estimate, Report, Term

STREAMS = ("compute", "communication")
COMPUTE_TERMS = ("gemm", "add", "norm", "copy", "kernel", "launch", "memory")
"""A term whose name holds one of these words runs on the compute stream; every other one moves data between ranks."""


@dataclass(frozen=True)
class Span:
    """One term on one stream, in microseconds from the start of the timeline."""

    name: str
    stream: str
    start_us: float
    duration_us: float


def to_trace(report: Report) -> str:
    """JSON text in the Trace Event Format; times in microseconds."""
    events: list[Json] = []
    for number, graph in enumerate(report.graphs):
        for fused in (False, True):
            process = 2 * number + int(fused)
            title = f"{graph.phase}, {graph.tokens} tokens: {'weaveopt' if fused else 'unfused'}"
            events.append(_name("process_name", process, 0, title))
            events.extend(_name("thread_name", process, i, stream) for i, stream in enumerate(STREAMS))
            events.extend(_events(process, graph.decisions, fused))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": report.model}}) + "\n"


def _name(kind: str, process: int, track: int, name: str) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _events(process: int, decisions: tuple[Decision, ...], fused: bool) -> Iterator[Json]:
    start_us = 0.0
    for decision, repetition in _in_order(decisions):
        estimate = decision.chosen.estimate if fused else decision.unfused
        if estimate is None:
            continue
        for span in spans(estimate, start_us):
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.stream,
                "pid": process,
                "tid": STREAMS.index(span.stream),
                "ts": span.start_us,
                "dur": span.duration_us,
                "args": {
                    "site": decision.site.id,
                    "module": decision.site.module,
                    "repetition": repetition,
                    "choice": decision.chosen.choice if fused else "unfused",
                },
            }
        start_us += estimate.us


def _in_order(decisions: tuple[Decision, ...]) -> Iterator[tuple[Decision, int]]:
    """Sites in the order of the whole model: neighbours that stand for n layers are one block, run n times."""
    for count, block in groupby(decisions, key=lambda decision: decision.site.count):
        sites = tuple(block)
        for repetition in range(count):
            for decision in sites:
                yield decision, repetition


def spans(estimate: Estimate, start_us: float) -> tuple[Span, ...]:
    """The terms one after the other; what overlaps (negative terms) moves communication under earlier computation.

    The last span ends `estimate.us` after `start_us`, unless more is hidden than lies before the communication.
    """
    hidden_us = -sum(term.us for term in estimate.terms if term.us < 0)
    placed: list[Span] = []
    now = start_us
    for term in estimate.terms:
        if term.us <= 0:
            continue
        stream = _stream(term)
        if stream == "communication" and hidden_us > 0:
            earlier_us = min(hidden_us, now - start_us)
            now -= earlier_us
            hidden_us -= earlier_us
        placed.append(Span(term.name, stream, now, term.us))
        now += term.us
    return tuple(placed)


def _stream(term: Term) -> str:
    return "compute" if any(word in term.name for word in COMPUTE_TERMS) else "communication"
