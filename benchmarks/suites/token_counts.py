"""Prefill of many lengths through one compiled model of symbolic sizes: is weave anywhere slower than Inductor?

Token counts between 100 and 16000, evenly apart in the logarithm and odd wherever that is possible. Each backend
compiles the model with `dynamic=True`, weave for as many regimes of token counts as it takes; each count's forward is
captured in CUDA graphs, which take turns.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

import weaveopt
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, replayed_us
from benchmarks.workloads import decoder
from benchmarks.workloads.decoder import INDUCTOR, SHAPES, WEAVE, Workload

LEAST, MOST = 100, 16000
MODEL = Setting("model", "llama-70b", among=tuple(SHAPES))
LAYERS = Setting("layers", 2, quick=1)
COUNT = Setting("count", 40, "number of token counts", quick=2)


@dataclass(frozen=True)
class Case:
    model: str
    seq: int


def counts(number: int) -> list[int]:
    """`number` token counts from `LEAST` to `MOST`, each next to a power of one ratio."""
    ratio = (MOST / LEAST) ** (1 / max(number - 1, 1))
    found = [round(LEAST * ratio**index) for index in range(number)]
    return [min(max(each | 1, LEAST), MOST) for each in found]


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    torch._dynamo.config.recompile_limit = 64
    model = decoder.make(place, SHAPES[asked.of(MODEL)], asked.of(LAYERS))
    forwards = {
        INDUCTOR: torch.compile(model, dynamic=True, fullgraph=True),
        WEAVE: torch.compile(model, backend="weave", dynamic=True, fullgraph=True),
    }
    for case in cases:
        workload = Workload(model, decoder.Case("prefill", 1, case.seq), place.device, gives_positions=False)
        steps = {name: partial(workload, forward) for name, forward in forwards.items()}
        for step in steps.values():
            step()  # compiles
        us = replayed_us(place, steps, Effort(6, 6 if case.seq < 4000 else 3), restore=workload.reset)
        yield record.row(
            case={
                "model": case.model, "seq": case.seq, "dtype": "bfloat16", "ranks": place.world,
                "layers": asked.of(LAYERS),
            },
            weave_us=us[WEAVE], baselines={INDUCTOR: us[INDUCTOR]},
        )  # fmt: skip
        del workload, steps
        gc.collect()
        torch.cuda.empty_cache()
    place.say(f"regimes {[str(graph.regime) for graph in weaveopt.report().graphs]}")


SUITES = (
    Suite(
        "attention_tokens", "prefill of many lengths through one compiled model", Needs(GPU, 2),
        lambda asked: [Case(asked.of(MODEL), tokens) for tokens in counts(asked.of(COUNT))], rows, ours=(WEAVE,),
        baselines=(INDUCTOR,), settings=(MODEL, LAYERS, COUNT), replaces=True,
    ),
)  # fmt: skip
