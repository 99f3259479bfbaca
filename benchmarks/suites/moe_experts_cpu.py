"""`weave::moe_experts` on this host's CPU, against transformers' forms of the same experts under Inductor.

Times are microseconds of this process's CPU time, all threads together: the median of calls that take turns. Each
variant is compiled whole, by the default backend.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import weaveopt.ops  # noqa: F401
from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, Step, host_us
from weaveopt.ops.experts.activation import ActivationName
from weaveopt.ops.experts.call import ExpertsCall

Tensor = torch.Tensor

MODELS: Mapping[str, tuple[int, int, int, int]] = MappingProxyType({
    "wide": (8, 2, 1024, 2048),
    "many": (64, 8, 1024, 256),
})  # fmt: skip
"""Experts, choices, hidden, inner."""
FORMS = ("grouped_mm", "batched_mm")
CALL = ExpertsCall(ActivationName.SILU, gated=True).encode()
DTYPE_NAMES = ("bfloat16", "float32")
MODEL = Setting("models", tuple(MODELS), quick=("many",), among=tuple(MODELS))
DTYPES = Setting("dtypes", DTYPE_NAMES, quick=DTYPE_NAMES[1:], among=DTYPE_NAMES)
TOKENS = Setting("tokens", (1, 8, 512), quick=(8,))


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str
    tokens: int


def steps(model: str, tokens: int, dtype: torch.dtype) -> dict[str, Step]:
    experts, choices, hidden, inner = MODELS[model]
    gate_up = torch.nn.Parameter((torch.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype))
    down = torch.nn.Parameter((torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype))
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.rand(tokens, experts).topk(choices, 1).indices
    weights = torch.rand(tokens, choices).softmax(1).to(dtype)

    def ours(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = torch.ops.weave.moe_experts(x, ids, weights, gate_up, None, down, None, CALL)
        return result

    def theirs(form: str) -> MixtralExperts:
        # A configuration of its own: a module reads its form there at every call.
        config = MixtralConfig(
            hidden_size=hidden, intermediate_size=inner, num_local_experts=experts, num_experts_per_tok=choices
        )
        config._experts_implementation = form
        with torch.device("meta"):
            module = MixtralExperts(config)
        module.gate_up_proj, module.down_proj = gate_up, down
        return module

    torch._dynamo.reset()
    found: dict[str, Step] = {}
    for name in ("weave", *FORMS):
        run = torch.compile(ours if name == "weave" else theirs(name), fullgraph=True, dynamic=False)
        found[name] = partial(run, x, ids, weights)
        found[name]()
    return found


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    warnings.filterwarnings("ignore", message="Dynamo detected a call to")
    for case in cases:
        found = steps(case.model, case.tokens, getattr(torch, case.dtype))
        want = found["grouped_mm"]()
        for name, step in found.items():
            assert torch.allclose(step(), want, rtol=2e-2, atol=2e-2), f"{case}: {name} is not what grouped_mm computes"  # type: ignore[arg-type]
        us = host_us(place, found, Effort(9, 1), warm=0, now=time.process_time)
        yield record.row(
            case={"model": case.model, "tokens": case.tokens, "dtype": case.dtype}, weave_us=us["weave"],
            baselines={form: us[form] for form in FORMS},
        )  # fmt: skip


SUITES = (
    Suite(
        "moe_experts", "a mixture's experts on the CPU", Needs(CPU, worlds=(1,)),
        lambda asked: product(Case, asked.of(MODEL), asked.of(DTYPES), asked.of(TOKENS)), rows, ours=("weave",),
        baselines=FORMS, settings=(MODEL, DTYPES, TOKENS),
    ),
)  # fmt: skip
