"""Predicted against measured: how far the cost model is off, and whether what it chooses is the fastest.

GEMMs, kernels bound by memory, attention, collectives, every kernel of the fused all-reduce + norm at sizes and row
lengths that no profile holds, sites left alone, and whole layers. A site's candidates are all measured, so the choice
can be compared with the best of them and with leaving the site alone. At many more sites (`sites`) only the choice and
leaving are measured: see benchmarks/workloads/prediction_sweep.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import accuracy, record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, GPU, Asked, Needs, Setting, Suite, UsageError
from benchmarks.suites import layers
from benchmarks.workloads import decoder
from benchmarks.workloads.prediction import Trial
from weaveopt import cost_model
from weaveopt.errors import ProfileError

MOST_SITES = 1000
PROFILE = Setting(
    "profile", "", "machine profile to compare with the clock (default: MACHINE if shipped, else h200x4 or cpu)"
)
LAYERS = Setting("layers", ("prefill:1024", "decode:8"), "whole layers to run on GPUs, or `none`", quick=("none",))
SITES = {
    GPU: Setting("sites", 260, "sites of a group at which only leaving and the choice are measured", quick=4),
    CPU: Setting("sites", 0, "sites of a group at which only leaving and the choice are measured", quick=4),
}


@dataclass(frozen=True)
class Case:
    """One part of the suite."""

    part: str
    """`model`, which has cases of its own, or the call of whole layers."""


def profile_of(device: str, asked: Asked) -> str:
    """A profile's name or file. Raises `UsageError`."""
    shipped = asked.machine if asked.machine in cost_model.names() else {GPU: "h200x4", CPU: "cpu"}[device]
    name = asked.of(PROFILE) or shipped
    try:
        cost_model.load(name)
    except ProfileError as error:
        raise UsageError(f"--set profile: {error}") from None
    return name


def cases(device: str, asked: Asked) -> list[Case]:
    profile_of(device, asked)
    if not 0 <= asked.of(SITES[device]) <= MOST_SITES:
        raise UsageError(f"--set sites={asked.of(SITES[device])}: expected 0 to {MOST_SITES}")
    words = [] if device == CPU or asked.of(LAYERS) == ("none",) else asked.of(LAYERS)
    for word in words:
        decoder.parse(word)
    return [Case("model"), *map(Case, words)]


def of_layers(whole: record.Row) -> list[record.Row]:
    """Two predictions for a row of the suite `llama_layers`: with the rewrites, and by Inductor alone."""
    found = []
    pairs = (("weave", whole.weave_us, whole.predicted_us),
             ("inductor", whole.baselines["inductor"], whole.parameters.get("inductor_predicted_us")))  # fmt: skip
    for name, us, predicted in pairs:
        if isinstance(predicted, float):
            row = record.row(
                case={"kind": "layers", "backend": name, **whole.case},
                weave_us=us, baselines={"measured": us}, predicted_us=predicted,
            )  # fmt: skip
            found.append(row)
    return found


def rows(device: str, place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    profile, found = profile_of(device, asked), list[record.Row]()
    torch.backends.cuda.matmul.allow_tf32 = False
    if Case("model") in cases:
        found = Trial(place.device, cost_model.load(profile), place.quick, asked.of(SITES[device])).run()
        yield from found
    words = ",".join(case.part for case in cases if case.part != "model")
    if words:
        [llama] = [suite for suite in layers.SUITES if suite.name == "llama_layers"]
        whole = Asked(asked.machine, asked.quick, {"cases": words, "profile": profile})
        for row in llama.rows(place, llama.cases(whole), whole):
            found += of_layers(row)
            yield from of_layers(row)
    place.say(summary(found))


def summary(rows: Sequence[record.Row]) -> str:
    """Errors by kind, and how good the choices are."""
    lines = [
        [each.kind, str(each.cases), f"{each.mean:.1%}", f"{each.p90:.1%}", f"{each.largest:.1%}"]
        for each in accuracy.errors(rows)
    ]
    text = record.table("predicted against measured", ["kind", "cases", "mean error", "90th", "largest"], lines)
    return f"{text}\n{accuracy.sentence(accuracy.choices(rows))}".rstrip()


def suite_of(device: str, needs: Needs) -> Suite[Case]:
    return Suite(
        "prediction", "how far the cost model is off, and whether what it chooses is the fastest", needs,
        partial(cases, device), partial(rows, device), ours=("the choice",), baselines=("measured", "leave"),
        predicted="the profile's price", settings=(PROFILE, SITES[device], *((LAYERS,) if device == GPU else ())),
        replaces=True,
    )  # fmt: skip


SUITES = (suite_of(GPU, Needs(GPU, 2)), suite_of(CPU, Needs(CPU, 2, worlds=(2,))))
