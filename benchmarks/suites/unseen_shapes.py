"""Random layers that no profile knows: the chosen form against every rule switched off, profiles alone, and Inductor.

`of_fastest` is the speed of the chosen form over the fastest of ours, `over_inductor` that over Inductor; a prediction
is of the whole layers. `steady_*` are the same of a second back to back, on GPUs. `tune_share` is the share of the
first compile that timing took, `again_s` what the step takes when all is known. `--set seed=N` draws other shapes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist

from benchmarks import accuracy, record
from benchmarks.ranks import Place, barrier
from benchmarks.suite import CPU, GPU, Asked, Needs, Setting, Suite
from benchmarks.workloads.decoder import INDUCTOR, WEAVE
from benchmarks.workloads.unseen_shapes import (
    BY_PROFILE,
    CPU_SPAN,
    GPU_SPAN,
    DrawnShape,
    UnseenResult,
    draw,
    made,
    measure,
    of_fastest,
)

SEED = Setting("seed", 20261127, "seed of the shapes")
COUNT = {GPU: Setting("shapes", 40, quick=1), CPU: Setting("shapes", 10, quick=1)}
LAYERS = Setting("layers", 4, quick=1)
BUDGET = Setting("tune_budget_s", 5.0, "budget of the timed kernels")
SPANS = {GPU: GPU_SPAN, CPU: CPU_SPAN}


@dataclass(frozen=True)
class Case(DrawnShape):
    seed: int


def cases(device: str, asked: Asked) -> list[Case]:
    seed = asked.of(SEED)
    return [Case(**asdict(shape), seed=seed) for shape in draw(SPANS[device], asked.of(COUNT[device]), seed)]


def row_of(place: Place, case: Case, layers: int, found: UnseenResult) -> record.Row:
    first, us = found.reports[WEAVE], dict(found.us)
    steps = {name: dict(report.steps_us) for name, report in found.reports.items()}
    tune_s = float(steps[WEAVE]["tune"]) * 1e-6
    return record.row(
        case={**asdict(case), "ranks": place.world, "layers": layers},
        weave_us=us.pop(WEAVE),
        baselines=us,
        predicted_us=found.predicted_us("warm"),
        parameters={
            "of_fastest": round(found.of_fastest, 4),
            "over_inductor": round(found.us[INDUCTOR] / found.us[WEAVE], 4),
            "by_profile_predicted_us": round(found.predicted_us(BY_PROFILE), 3),
            "gemm_error": round(found.gemm_error, 4),
            "gemms": len(found.gemm_errors),
            "kernels": len(first.kernels),
            "tune_s": round(tune_s, 3),
            "tune_share": round(tune_s / found.seconds[WEAVE], 4),
            "again_s": round(float(steps["again"]["tune"]) * 1e-6, 4),
            **_steady(found),
            "chosen": " ".join(sorted({each.chosen.choice for each in first.decisions if each.rewritten})),
        },
    )


def _steady(found: UnseenResult) -> dict[str, float]:
    if not found.steady:
        return {}
    us, predicted_us = found.steady_us, found.predicted_steady_us("warm")
    return {
        "steady_us": round(us[WEAVE], 3),
        "steady_of_fastest": round(of_fastest(us), 4),
        "steady_over_inductor": round(us[INDUCTOR] / us[WEAVE], 4),
        "steady_watts": round(found.steady[WEAVE].watts),
        **({} if predicted_us is None else {"steady_predicted_us": round(predicted_us, 3)}),
    }


@contextmanager
def shared_folder(place: Place) -> Iterator[str]:
    """An empty folder of all ranks; it is deleted once each is through."""
    with tempfile.TemporaryDirectory(prefix="unseen-shapes-") if place.rank == 0 else nullcontext("") as made_here:
        folder = [made_here]
        dist.broadcast_object_list(folder)
        yield folder[0]
        barrier()


def rows(device: str, place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    torch._dynamo.config.recompile_limit = 256
    found, layers = list[record.Row](), asked.of(LAYERS)
    place.say(f"seed {asked.of(SEED)}")
    for case in cases:
        with shared_folder(place) as folder, torch.no_grad():
            model = made(place, case, layers, SPANS[device].head_dim)
            row = row_of(place, case, layers, measure(place, model, case, folder, asked.of(BUDGET)))
        del model
        found.append(row)
        yield row
    place.say(summary(found))


def summary(rows: Sequence[record.Row]) -> str:
    """How good the choices and predictions are, over all shapes."""
    if not rows:
        return ""
    errors = [accuracy.error_of(row) for row in rows]
    untimed = [abs(float(row.parameters["by_profile_predicted_us"]) / row.baselines[BY_PROFILE] - 1) for row in rows]

    def of(name: str) -> list[float]:
        return [float(row.parameters[name]) for row in rows]

    again = [float(row.parameters["gemm_error"]) for row in rows if row.parameters["gemms"]]
    gemms = f"{fmean(again):.1%}" if again else "none timed"

    steady = [row for row in rows if "steady_us" in row.parameters]
    return "\n".join(
        [
            f"{len(rows)} shapes: of the fastest {fmean(of('of_fastest')):.3f} on average, {min(of('of_fastest')):.3f} "
            f"at least; over Inductor {fmean(of('over_inductor')):.3f}, {min(of('over_inductor')):.3f} at least",
            f"layers predicted: mean error {fmean(errors):.1%}, 90th {accuracy.p90(errors):.1%}, largest "
            f"{max(errors):.1%}; by profiles alone {fmean(untimed):.1%}, {accuracy.p90(untimed):.1%}, "
            f"{max(untimed):.1%}; GEMMs alone {gemms}",
            *([_steady_summary(steady)] if steady else []),
            f"timing: {max(of('tune_share')):.1%} of a compile at most, {max(of('again_s')):.3f} s when known",
        ]
    )


def _steady_summary(rows: Sequence[record.Row]) -> str:
    fastest = [float(row.parameters["steady_of_fastest"]) for row in rows]
    over = [float(row.parameters["steady_over_inductor"]) for row in rows]
    errors = [
        abs(float(row.parameters["steady_predicted_us"]) / float(row.parameters["steady_us"]) - 1.0)
        for row in rows
        if "steady_predicted_us" in row.parameters
    ]
    predicted = f"; predicted: mean error {fmean(errors):.1%}, 90th {accuracy.p90(errors):.1%}" if errors else ""
    return (
        f"back to back: of the fastest {fmean(fastest):.3f} on average, {min(fastest):.3f} at least; over Inductor "
        f"{fmean(over):.3f}, {min(over):.3f} at least{predicted}"
    )


def suite_of(device: str, needs: Needs) -> Suite[Case]:
    return Suite(
        "unseen_shapes", "random layers that no profile knows: is the choice the fastest, and the prediction right?",
        needs, partial(cases, device), partial(rows, device), ours=(WEAVE,), baselines=(INDUCTOR, BY_PROFILE),
        predicted="the whole layers, kernels timed", settings=(SEED, COUNT[device], LAYERS, BUDGET), by_name_only=True,
        replaces=True,
    )  # fmt: skip


SUITES = (suite_of(GPU, Needs(GPU, worlds=(2, 1))), suite_of(CPU, Needs(CPU, 2, worlds=(2,))))
