"""The decode loop in the report: as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from weaveopt.plain_json import Json
from weaveopt.records.generation import GenerationReport
from weaveopt.wording import counted


def lines(report: GenerationReport) -> Iterator[str]:
    """A line a form of step, then one for each kind of call that ran in transformers' loop."""
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
    }
