"""The decode loop and continuous batching in the report: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from weaveopt.plain_json import Json
from weaveopt.records.generation import BatchingReport, GenerationReport
from weaveopt.wording import counted


def lines(report: GenerationReport) -> Iterator[str]:
    """A line a form of step, one for each kind of call that ran in transformers' loop, one a path of batching."""
    for step in report.steps:
        how = "one CUDA graph a step" if step.captured else f"not captured ({step.not_captured or 'too few steps yet'})"
        with_what = f"not compiled ({step.not_compiled})" if step.not_compiled else f"compiled with {step.backend}"
        if step.choosing_not_compiled:
            with_what += f", what chooses tokens not compiled ({step.choosing_not_compiled})"
        share = "" if step.host_share is None else f", {step.host_share:.0%} of the loop's time outside of steps"
        yield (
            f"generate: batch {step.batch}, cache of {step.cache_length}, {step.choice}, {with_what}: "
            f"{how}; {counted(step.calls, 'call')}, {counted(step.steps, 'step')}, {counted(step.replays, 'replay')}, "
            f"{step.beyond_stop} beyond the stop{share}"
        )
    for left in report.left:
        yield f"generate: {counted(left.count, 'call')} in transformers' own loop ({left.loop}):"
        for reason in left.reasons:
            yield f"  {reason.code}: {reason.message}"
    yield from _batching_lines(report.batching)


PATHS = {"varlen": "of any lengths", "block_tables": "by block tables"}
MOST_SIZES = 4
WARM_UP = "times of its graph are those of transformers' warm-up: the largest step, over all pages of the cache"


def _batching_lines(report: BatchingReport) -> Iterator[str]:
    for path in report.paths:
        with_what = "not compiled" if path.backend == "none" else f"compiled with {path.backend}"
        often = sorted(path.sizes, key=lambda size: (-size[1], size[0]))
        sizes = ", ".join(f"{number} of {tokens}" for tokens, number in often[:MOST_SIZES])
        rest = f", {counted(len(often) - MOST_SIZES, 'other size')}" if len(often) > MOST_SIZES else ""
        yield (
            f"generate_batch: {counted(path.steps, 'step')} {PATHS.get(path.path, path.path)}, {with_what} "
            f"(tokens with padding: {sizes}{rest})"
        )
    if any((path.path, path.backend) == ("varlen", "weave") for path in report.paths):
        yield f"generate_batch: {WARM_UP}"
    if report.host_share is not None:
        yield f"generate_batch: {report.host_share:.0%} of the loop's time outside of steps"


def document(report: GenerationReport) -> Json:
    return {
        "steps": [{**asdict(step), "host_share": step.host_share} for step in report.steps],
        "left": [
            {
                "loop": left.loop,
                "count": left.count,
                "reasons": [{"code": r.code, "message": r.message, "values": dict(r.values)} for r in left.reasons],
            }
            for left in report.left
        ],
        "batching": {
            "paths": [{**asdict(path), "steps": path.steps} for path in report.batching.paths],
            "loop_us": report.batching.loop_us,
            "step_us": report.batching.step_us,
            "overlapped": report.batching.overlapped,
            "host_share": report.batching.host_share,
        },
    }
