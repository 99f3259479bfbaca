"""`weave::moe_experts` on this host's CPU, beside transformers' forms of the same experts under Inductor.

    python -m benchmarks.moe_experts [--models wide many] [--tokens 1 8 512] [--dtypes bfloat16 float32] [--seconds 120]

Prints microseconds of this process's CPU time, all threads together: the median of calls that take turns. Each variant
is compiled whole, by the default backend.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import weaveopt.ops  # noqa: F401
from weaveopt.expert_kernels.call import ExpertsCall
from weaveopt.mixtures.activation import ActivationName

Tensor = torch.Tensor
Step = Callable[[], Tensor]

MODELS: Mapping[str, tuple[int, int, int, int]] = MappingProxyType({
    "wide": (8, 2, 1024, 2048),
    "many": (64, 8, 1024, 256),
})  # fmt: skip
"""Experts, choices, hidden, inner."""
FORMS = ("grouped_mm", "batched_mm")
CALL = ExpertsCall(ActivationName.SILU, gated=True).encode()
LEAST_CALLS, MOST_CALLS = 3, 25


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


def time_in_turns(found: Mapping[str, Step], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in found}
    end = time.perf_counter() + seconds
    for round_ in range(MOST_CALLS):
        if round_ >= LEAST_CALLS and time.perf_counter() > end:
            break
        for name, step in found.items():
            begin = time.process_time()
            step()
            times[name].append((time.process_time() - begin) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=(1, 8, 512))
    parser.add_argument("--dtypes", nargs="*", default=("bfloat16", "float32"))
    parser.add_argument("--seconds", type=float, default=120.0, help="of all cases together, compilation apart")
    asked = parser.parse_args()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="Dynamo detected a call to")
    cases = [(m, t, d) for m in asked.models for d in asked.dtypes for t in asked.tokens]
    with torch.no_grad():
        for model, tokens, name in cases:
            dtype = getattr(torch, name)
            found = steps(model, tokens, dtype)
            want = found["grouped_mm"]()
            for other, step in found.items():
                if not torch.allclose(step(), want, rtol=2e-2, atol=2e-2):
                    raise SystemExit(f"{model}, {tokens} tokens, {name}: {other} is not what grouped_mm computes")
            times = time_in_turns(found, asked.seconds / len(cases))
            words = "  ".join(f"{form} {times[form]:10.0f} us {times[form] / times['weave']:5.2f}x" for form in FORMS)
            print(f"{model} {tokens:4d} tokens {name:8s} weave {times['weave']:10.0f} us  {words}", flush=True)


if __name__ == "__main__":
    main()
