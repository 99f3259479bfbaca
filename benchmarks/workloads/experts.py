"""A mixture's experts on one GPU: cases, their data, and every implementation of them."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F

import weaveopt.ops  # noqa: F401
from benchmarks import gpu_limits
from benchmarks.ranks import Place
from benchmarks.timing import Effort, Step, replayed_us
from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.activation import ActivationName
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.expert_ranges import whole
from weaveopt.ops.experts.plan import ExpertsLaunch
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

Tensor = torch.Tensor
Weights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""`gate_up` and `down`, each followed by its bias."""
Call = Callable[[int], Tensor]
"""Computes the case by the routing of this number."""
Activate = Callable[[Tensor], Tensor]

NUM_ROUTINGS = 8
"""In turn, so that experts of one call are not found in the L2 by the next."""
LEAST_WIDE_ROWS = 256
MOST_BATCHED_BYTES = 24e9
"""Most weights that `batched_mm` may copy."""
SILU = ExpertsCall(ActivationName.SILU, gated=True)
CLAMPED = ExpertsCall(ActivationName.CLAMPED_SWISH, gated=True, interleaved=True, alpha=1.702, limit=7.0)


def silu_times_up(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def clamped_swish(z: Tensor) -> Tensor:
    gate, up = z[..., ::2].clamp(max=CLAMPED.limit), z[..., 1::2].clamp(-CLAMPED.limit, CLAMPED.limit)
    return (up + 1) * gate * torch.sigmoid(CLAMPED.alpha * gate)


ACTIVATE: Mapping[ExpertsCall, Activate] = MappingProxyType({SILU: silu_times_up, CLAMPED: clamped_swish})
"""As models write them: Inductor traces these."""


@dataclass(frozen=True)
class Model:
    """Experts of one layer, over all ranks."""

    experts: int
    choices: int
    hidden: int
    inner: int
    call: ExpertsCall = SILU
    transposed: bool = False
    """Weights lie as [E, H, N1] and [E, I, H], and there are biases."""


MODELS: Mapping[str, Model] = MappingProxyType({
    "mixtral-8x22b": Model(8, 2, 6144, 16384),
    "qwen3-30b-a3b": Model(128, 8, 2048, 768),
    "qwen3-235b-a22b": Model(128, 8, 4096, 1536),
    "gpt-oss-120b": Model(128, 4, 2880, 2880, CLAMPED, transposed=True),
})  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One rank's experts of a layer, on the tokens of all `ranks`."""

    model: str
    tokens: int
    """Tokens of each rank."""
    routing: str
    """`uniform`; or `skewed`, half of all tokens on an eighth of the experts."""
    ranks: int = 2


class Data:
    """Tensors of one case, and the ways to compute it."""

    def __init__(self, case: Case, weights: Weights) -> None:
        self.case, self.model = case, MODELS[case.model]
        self.gate_up, self.gate_up_bias, self.down, self.down_bias = weights
        tokens = case.tokens * case.ranks
        self.x = torch.randn(tokens, self.model.hidden, device="cuda").bfloat16()
        routed = [route(case, tokens) for _ in range(NUM_ROUTINGS)]
        self.experts, self.weights = [ids for ids, _ in routed], [weights for _, weights in routed]
        own = [ids[ids < self.num_experts] for ids in self.experts]
        self.own_rows = statistics.mean(len(ids) for ids in own)
        self.active = statistics.mean(len(ids.unique()) for ids in own)

    @property
    def num_experts(self) -> int:
        return self.model.experts // self.case.ranks

    @property
    def shape(self) -> ExpertsShape:
        return checked_shape(self.operands(0), self.model.call)

    @property
    def weight_bytes(self) -> float:
        """Weights of the experts that have rows."""
        return self.active * 3 * self.model.hidden * self.model.inner * 2

    @property
    def flops(self) -> float:
        return self.own_rows * 6 * self.model.hidden * self.model.inner

    @property
    def bound_us(self) -> float:
        most = gpu_limits.limits(self.x.device)
        return max(self.weight_bytes / most.bytes_per_us, self.flops / most.flops_per_us)

    def operands(self, at: int) -> ExpertOperands:
        return ExpertOperands(
            self.x, self.experts[at], self.weights[at], self.gate_up, self.gate_up_bias, self.down, self.down_bias
        )

    def weave(self, how: ExpertsLaunch) -> Call:
        return lambda at: gpu.launch(self.operands(at), self.model.call, how)

    def native(self, how: hopper.HopperPlan) -> Call:
        return lambda at: hopper.launch(self.operands(at), self.model.call, how)

    def planned(self, kernels: ExpertsKernel = ExpertsKernel.TRITON) -> Call:
        call = replace(self.model.call, kernels=kernels).encode()

        def run(at: int) -> Tensor:
            of = self.operands(at)
            result: Tensor = torch.ops.weave.moe_experts(
                of.x, of.experts, of.weights, of.gate_up, of.gate_up_bias, of.down, of.down_bias, call
            )
            return result

        return run

    def grouped(self) -> Call:
        run, act = compiled(grouped), ACTIVATE[self.model.call]
        return lambda at: run(self.operands(at), act)

    def batched(self) -> Call:
        run, act = compiled(batched), ACTIVATE[self.model.call]
        return lambda at: run(self.operands(at), act)

    def grouped_alone(self) -> Call:
        """Both GEMMs and the activation, of rows that were sorted and gathered beforehand; nothing is added up."""
        run, act = compiled(between_grouped), ACTIVATE[self.model.call]
        ready = [sorted_rows(self.operands(at)) for at in range(NUM_ROUTINGS)]
        return lambda at: run(ready[at], self.operands(at), act)

    def runs_hopper(self) -> bool:
        """True if calls that name the native kernels differ from one with Triton's."""
        return not hopper.unsupported(self.operands(0), self.shape)

    def runs_wide(self) -> bool:
        """True if the kernels for many rows an expert support the weights, and there are some hundred rows."""
        return not self.model.transposed and self.own_rows >= LEAST_WIDE_ROWS * self.num_experts

    def fits(self, name: str) -> bool:
        copied = self.shape.rows * 3 * self.model.hidden * self.model.inner * 2
        return name != "batched_mm" or copied <= MOST_BATCHED_BYTES


def make_weights(model: Model, ranks: int) -> Weights:
    """Random weights of one rank."""
    experts, rows = model.experts // ranks, 2 * model.inner

    def normal(*sizes: int, scale: float) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="cuda").normal_(std=scale)

    first, second = model.hidden**-0.5, model.inner**-0.5
    if not model.transposed:
        gate_up = normal(experts, rows, model.hidden, scale=first)
        return gate_up, None, normal(experts, model.hidden, model.inner, scale=second), None
    gate_up = normal(experts, model.hidden, rows, scale=first).transpose(1, 2)
    down = normal(experts, model.inner, model.hidden, scale=second).transpose(1, 2)
    return gate_up, normal(experts, rows, scale=0.1), down, normal(experts, model.hidden, scale=0.1)


def route(case: Case, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids [T, k], this rank's first and others as `experts // ranks`, as HF marks them; weights that add up to 1."""
    model = MODELS[case.model]
    scores = torch.rand(tokens, model.experts, device="cuda")
    if case.routing == "skewed":
        drawn = torch.rand(tokens, 1, device="cuda") < 0.5
        popular = torch.arange(model.experts, device="cuda") % 8 == 0
        scores = scores + (drawn & popular)
    ids = scores.topk(model.choices, 1).indices
    weights = torch.rand(tokens, model.choices, device="cuda").softmax(1).bfloat16()
    own = model.experts // case.ranks
    return ids.clamp(max=own), weights.masked_fill(ids >= own, 0.0)


@dataclass(frozen=True)
class Sorted:
    """Rows by expert."""

    rows: Tensor
    """[S, H], foreign ones last."""
    experts: Tensor
    """[S] of each, at most E - 1."""
    remote: Tensor
    """[S, 1]"""
    ends: Tensor
    """int32 [E]"""
    order: Tensor


def sorted_rows(of: ExpertOperands) -> Sorted:
    num_experts = of.gate_up.shape[0]
    ids, order = of.experts.reshape(-1).sort()
    counts = torch.histc(ids.int(), bins=num_experts, min=0, max=num_experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = of.x[order // of.experts.shape[1]]
    return Sorted(rows, ids.clamp(max=num_experts - 1), (ids >= num_experts)[:, None], ends, order)


def between_grouped(ready: Sorted, of: ExpertOperands, act: Activate) -> Tensor:
    inner = torch._grouped_mm(ready.rows, whole(of.gate_up).transpose(1, 2), ready.ends)
    if of.gate_up_bias is not None:
        inner = inner + of.gate_up_bias[ready.experts]
    result = torch._grouped_mm(act(inner), whole(of.down).transpose(1, 2), ready.ends)
    return result if of.down_bias is None else result + of.down_bias[ready.experts]


def grouped(of: ExpertOperands, act: Activate) -> Tensor:
    """Experts of transformers' models in prefill."""
    ready = sorted_rows(of)
    rows = between_grouped(ready, of, act)
    weighted = (rows * of.weights.reshape(-1)[ready.order][:, None]).masked_fill(ready.remote, 0.0)
    back = torch.empty_like(ready.order)
    back[ready.order] = torch.arange(len(ready.order), device=back.device)
    return weighted[back].view(*of.experts.shape, -1).sum(1).to(of.x.dtype)


def batched(of: ExpertOperands, act: Activate) -> Tensor:
    """Experts of transformers' models in decode: weights are read for each token and choice."""
    ids = of.experts.reshape(-1)
    remote = ids >= len(of.gate_up)
    ids = ids.clamp(max=len(of.gate_up) - 1)
    rows = of.x.repeat_interleave(of.experts.shape[1], 0)
    inner = torch.bmm(whole(of.gate_up)[ids], rows[..., None])[..., 0]
    if of.gate_up_bias is not None:
        inner = inner + of.gate_up_bias[ids]
    result = torch.bmm(whole(of.down)[ids], act(inner)[..., None])[..., 0]
    if of.down_bias is not None:
        result = result + of.down_bias[ids]
    weights = of.weights.reshape(-1).masked_fill(remote, 0.0)
    return (result * weights[:, None]).view(*of.experts.shape, -1).sum(1).to(of.x.dtype)


@functools.cache
def compiled(way: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(way, dynamic=False)


def expected(of: ExpertOperands, call: ExpertsCall) -> Tensor:
    """Every expert on every token, in fp32: an oracle that sorts nothing. [T, H] fp32."""
    y = torch.zeros(of.x.shape, device=of.x.device)
    for expert in range(len(of.gate_up)):
        inner = F.linear(of.x.float(), of.gate_up[expert].float())
        if of.gate_up_bias is not None:
            inner = inner + of.gate_up_bias[expert].float()
        row = F.linear(call.act(inner).bfloat16().float(), of.down[expert].float())
        if of.down_bias is not None:
            row = row + of.down_bias[expert].float()
        weight = of.weights.float().masked_fill(of.experts != expert, 0.0).sum(1, keepdim=True)
        y += weight * row
    return y


BASELINES: Mapping[str, Callable[[Data], Call]] = MappingProxyType({
    "grouped_mm": Data.grouped,
    "grouped_mm_alone": Data.grouped_alone,
    "batched_mm": Data.batched,
})  # fmt: skip


def over_all(call: Call) -> Step:
    """`call` for every routing in turn."""

    def step() -> None:
        for at in range(NUM_ROUTINGS):
            call(at)

    return step


def times_us(place: Place, calls: Mapping[str, Call], rounds: int = 9) -> dict[str, float]:
    """Microseconds a call by name; without those whose capture raises, as calls that need too much memory do."""
    steps = {name: over_all(call) for name, call in calls.items()}
    return replayed_us(place, steps, Effort(rounds, 1), NUM_ROUTINGS, may_fail=tuple(calls))
