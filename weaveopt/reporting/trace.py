"""The predicted timeline as a Chrome trace (open it in Perfetto or chrome://tracing).

Two processes a graph, the unfused graph and the chosen one; one track a stream. Where a variant of the graph runs, its
schedule is drawn, in which other parts' computation hides exchanges; otherwise sites and kernels one after the other.
Kernels outside the sites are drawn where the report has them; otherwise the sites alone, which the metadata says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from weaveopt.plain_json import Json
from weaveopt.records.report import GraphReport, OutsideWork, Report
from weaveopt.records.task import ScheduledTask, Stream
from weaveopt.reporting.timeline import STREAMS, Block, module_of, spans_of, title, total, unrolled

_TRACK = {stream: index for index, stream in enumerate(Stream)}


def to_trace(report: Report) -> str:
    """JSON text in the Trace Event Format; times in microseconds."""
    events: list[Json] = []
    for number, graph in enumerate(report.graphs):
        for fused in (False, True):
            process = 2 * number + int(fused)
            times = total(graph, fused)
            named = f"{title(graph)}: {'weaveopt' if fused else 'unfused'}"
            exposed = f"{times.exposed_us:,.1f} us of communication exposed ({times.exposed_share:.0%})"
            events.append(_metadata("process_name", process, 0, "name", named))
            events.append(_metadata("process_labels", process, 0, "labels", exposed))
            scheduled = graph.schedule if fused else graph.schedule_before
            streams = dict.fromkeys((*STREAMS, *(task.stream for task in scheduled)))
            events.extend(_metadata("thread_name", process, _TRACK[each], "name", each) for each in streams)
            events.extend(_scheduled(process, scheduled) if scheduled else _events(process, graph, fused))
    other: Json = {"model": report.model, "graphs": [_graph(graph) for graph in report.graphs]}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + "\n"


def _metadata(kind: str, process: int, track: int, key: str, value: str) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {key: value}}


def _graph(graph: GraphReport) -> Json:
    before, after = total(graph, fused=False), total(graph, fused=True)
    return {
        "name": graph.name,
        "covers": _covered(graph),
        "before_us": before.us,
        "after_us": after.us,
        "exposed_before_us": before.exposed_us,
        "exposed_after_us": after.exposed_us,
    }


def _covered(graph: GraphReport) -> str:
    if graph.schedule:
        return "the layers that were captured"
    return "the whole model" if graph.work else "the sites alone"


def _scheduled(process: int, tasks: Sequence[ScheduledTask]) -> Iterator[Json]:
    for task in tasks:
        yield {
            "ph": "X",
            "name": task.name,
            "cat": task.stream,
            "pid": process,
            "tid": _TRACK[task.stream],
            "ts": task.start_us,
            "dur": task.us,
            "args": {"module": task.module},
        }


def _events(process: int, graph: GraphReport, fused: bool) -> Iterator[Json]:
    for block, repetition, span in spans_of(unrolled(graph), fused):
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.stream,
            "pid": process,
            "tid": _TRACK[span.stream],
            "ts": span.start_us,
            "dur": span.duration_us,
            "args": {**_arguments(block, fused), "repetition": repetition},
        }


def _arguments(block: Block, fused: bool) -> dict[str, Json]:
    if isinstance(block, OutsideWork):
        return {"module": module_of(block), "kind": block.kind}
    choice = block.chosen.choice if fused else "unfused"
    return {"site": block.site.id, "module": module_of(block), "choice": choice}
