"""`weave::expert_exchange` on the GPUs of one host, against what runs there without it.

bf16; every rank has as many tokens of its own, routed uniformly or with half of all choices on an eighth of the
experts. Every variant's calls run in a CUDA graph. Baselines:

all_to_all       rows and results by NCCL with the exact sizes, which are known beforehand here (a model has to exchange
                 and read them on the host in every layer), experts by `torch._grouped_mm`
all_gather       all tokens on all ranks, own experts by `torch._grouped_mm`, a reduce-scatter
gather_experts   the same with `weave::moe_experts` in between

The bound is the largest of the active weights and FLOPs, at the rates of `gpu_limits`, and of what crosses a link at
the highest rate measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import weaveopt.ops  # noqa: F401
from benchmarks import gpu_limits, record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite, UsageError, product
from benchmarks.timing import Effort, chain, replayed_us
from benchmarks.workloads.reduction import PUSH_BYTES_PER_S
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded.op import SITES
from weaveopt.records.candidate import Fabric

TIMEOUT_S = 30.0
MOST_TOKENS = 8192
HOW_ROUTED = ("uniform", "skewed")
TOKENS = Setting("tokens", (1, 8, 64, 333, 512, 2048, 3001, MOST_TOKENS), "of each rank", quick=(64,))
ROUTINGS = Setting("routings", HOW_ROUTED, quick=HOW_ROUTED[:1], among=HOW_ROUTED)
CALLS_IN_GRAPH = 4
LARGEST_ERROR = 3e-2
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """One layer's experts, of all ranks together."""

    hidden: int
    inner: int
    experts: int
    choices: int


MODELS = {
    "mixtral-8x22b": Model(6144, 16384, 8, 2),
    "qwen3-30b-a3b": Model(2048, 768, 128, 8),
    "qwen3-235b-a22b": Model(4096, 1536, 128, 8),
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "olmoe-1b-7b": Model(2048, 1024, 64, 8),
}


@dataclass(frozen=True)
class Case:
    model: str
    tokens: int
    """Tokens of each rank."""
    routing: str


@dataclass(frozen=True)
class Weights:
    gate_up: Tensor
    down: Tensor


def make_weights(model: Model, place: Place) -> Weights:
    made = torch.Generator(place.device).manual_seed(place.rank)
    experts = model.experts // place.world

    def weight(rows: int, columns: int) -> Tensor:
        found = torch.empty(experts, rows, columns, device=place.device, dtype=DTYPE)
        return found.normal_(0.0, columns**-0.5, generator=made)

    return Weights(weight(2 * model.inner, model.hidden), weight(model.hidden, model.inner))


def choose(case: Case, model: Model, place: Place) -> Tensor:
    """Ids [ranks, tokens, choices], the same on all ranks; no token has an expert twice."""
    made = torch.Generator(place.device).manual_seed(case.tokens)
    scores = torch.rand(place.world, case.tokens, model.experts, generator=made, device=place.device)
    if case.routing == "skewed":
        few = max(1, model.experts // 8)
        often = torch.rand(place.world, case.tokens, 1, generator=made, device=place.device) < 0.5
        scores[..., :few] += often.float()
    return scores.topk(model.choices).indices


class Layer:
    """One case on this rank."""

    def __init__(self, case: Case, weights: Weights, place: Place) -> None:
        self.case, self.model, self.weights, self.place = case, MODELS[case.model], weights, place
        self.num_experts = self.model.experts // place.world
        self.every = choose(case, self.model, place)
        self.experts = self.every[place.rank]
        made = torch.Generator(place.device).manual_seed(100 + place.rank)
        self.x = torch.randn(case.tokens, self.model.hidden, generator=made, device=place.device).to(DTYPE)
        self.factors = torch.rand(self.experts.shape, generator=made, device=place.device)
        self.owner = self.every // self.num_experts

    def exchange(self, kernels: ExpertsKernel) -> Callable[[], Tensor]:
        text = exchange_call(self.case, self.place, kernels).encode()
        return lambda: torch.ops.weave.expert_exchange(  # type: ignore[no-any-return]
            self.x, self.experts, self.factors, self.weights.gate_up, None, self.weights.down, None, text
        )

    def gathered(self, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        """All tokens on all ranks; `experts` of rows, ids (foreign ones are not below `num_experts`) and factors."""
        tokens, world = self.case.tokens, self.place.world

        def gather(own: Tensor) -> Tensor:
            found = own.new_empty(world * tokens, *own.shape[1:])
            dist.all_gather_into_tensor(found, own.contiguous())
            return found

        def run() -> Tensor:
            rows, ids, factors = gather(self.x), gather(self.experts), gather(self.factors)
            ids = ids - self.place.rank * self.num_experts
            sums = experts(rows, torch.where((ids >= 0) & (ids < self.num_experts), ids, self.num_experts), factors)
            out = torch.empty_like(self.x)
            dist.reduce_scatter_tensor(out, sums)
            return out

        return run

    def by_grouped_mm(self, rows: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        """The weighted sums of rows that several experts may take, as transformers makes them."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        made = self._two_gemms(rows[order // ids.shape[1]], flat, order)
        weighted = made.float() * factors.flatten()[order][:, None]
        remote = (flat[order] >= self.num_experts)[:, None]
        back = torch.empty_like(weighted)
        back[order] = weighted.masked_fill(remote, 0.0)
        return back.view(*ids.shape, -1).sum(1).to(DTYPE)

    def _two_gemms(self, sorted_rows: Tensor, ids: Tensor, order: Tensor) -> Tensor:
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        ends = counts[:-1].cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(sorted_rows, self.weights.gate_up.transpose(1, 2), ends).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        return torch._grouped_mm(inner, self.weights.down.transpose(1, 2), ends)

    def by_moe_experts(self, rows: Tensor, ids: Tensor, factors: Tensor) -> Tensor:
        call = ExpertsCall("silu", True, kernels=ExpertsKernel.HOPPER).encode()
        found: Tensor = torch.ops.weave.moe_experts(
            rows, ids, factors, self.weights.gate_up, None, self.weights.down, None, call
        )
        return found

    def all_to_all(self) -> Callable[[], Tensor]:
        """One row for each (token, destination), and one home for each choice; all sizes and places are known."""
        world, rank, choices = self.place.world, self.place.rank, self.model.choices

        def to(source: int, owner: int) -> tuple[Tensor, Tensor]:
            """The tokens that go there, and the choices [row, choice] that are there, with their rows."""
            goes = self.owner[source] == owner
            (token,) = goes.any(-1).nonzero(as_tuple=True)
            return token, goes[token]

        sent = [to(rank, owner) for owner in range(world)]
        came = [to(source, rank) for source in range(world)]
        out_rows, in_rows = [len(token) for token, _ in sent], [len(token) for token, _ in came]
        out_home, in_home = [int(there.sum()) for _, there in sent], [int(there.sum()) for _, there in came]
        tokens = torch.cat([token for token, _ in sent])
        came_ids = torch.cat([self.every[source][token][there] for source, (token, there) in enumerate(came)])
        row_of_choice = torch.cat([there for _, there in came]).nonzero(as_tuple=True)[0]
        local = came_ids - rank * self.num_experts
        places = torch.cat([
            (token[:, None] * choices + torch.arange(choices, device=token.device))[there] for token, there in sent
        ])  # fmt: skip

        def exchange(rows: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Tensor:
            found = rows.new_empty(sum(in_sizes), rows.shape[1])
            dist.all_to_all_single(found, rows, in_sizes, out_sizes)
            return found

        def run() -> Tensor:
            rows = exchange(self.x[tokens], out_rows, in_rows)
            order = local.argsort(stable=True)
            made = self._two_gemms(rows[row_of_choice[order]], local, order)
            results = torch.empty_like(made)
            results[order] = made
            home = exchange(results, in_home, out_home)
            by_choice = torch.empty(self.experts.numel(), self.model.hidden, device=home.device, dtype=DTYPE)
            by_choice[places] = home
            weighted = by_choice.view(*self.experts.shape, -1).float() * self.factors[..., None]
            return weighted.sum(1).to(DTYPE)

        return run

    @property
    def bound_us(self) -> float:
        """Bound of the rank with most work."""
        model, owner = self.model, self.owner
        limits = gpu_limits.limits(owner.device)
        worst = 0.0
        for rank in range(self.place.world):
            mine = owner == rank
            active = len(self.every[mine].unique())
            weights = active * 3 * model.inner * model.hidden * DTYPE.itemsize / limits.bytes_per_us
            flops = 6.0 * int(mine.sum()) * model.inner * model.hidden / limits.flops_per_us
            others = torch.arange(self.place.world, device=owner.device) != rank
            crossing = int(mine[others].any(-1).sum()) * model.hidden * DTYPE.itemsize / PUSH_BYTES_PER_S * 1e6
            worst = max(worst, weights, flops, crossing)
        return worst


def exchange_call(case: Case, place: Place, kernels: ExpertsKernel) -> ExpertExchangeCall:
    model = MODELS[case.model]
    return ExpertExchangeCall(
        site=f"benchmark.{case.model}.{kernels}", group=place.group, fabric=Fabric.PEER, world=place.world,
        hidden=model.hidden, dtype="bfloat16", max_tokens=MOST_TOKENS, timeout_s=TIMEOUT_S,
        num_experts=model.experts // place.world, choices=model.choices, same_tokens=True, kernels=kernels.value,
    )  # fmt: skip


def row_of(case: Case, weights: Weights, place: Place) -> record.Row:
    layer = Layer(case, weights, place)
    steps = {
        "triton": layer.exchange(ExpertsKernel.TRITON),
        "hopper": layer.exchange(ExpertsKernel.HOPPER),
        "all_to_all": layer.all_to_all(),
        "all_gather": layer.gathered(layer.by_grouped_mm),
        "gather_experts": layer.gathered(layer.by_moe_experts),
    }
    want = steps["all_gather"]().float()
    for name, step in steps.items():
        error = (step().float() - want).abs().max().item()
        assert error < LARGEST_ERROR * max(want.abs().max().item(), 1.0), f"{case}: {name} is off by {error}"

    chains = {name: chain(step, CALLS_IN_GRAPH) for name, step in steps.items()}
    us = replayed_us(place, chains, Effort(6, 2), CALLS_IN_GRAPH)
    ours = {name: us.pop(name) for name in ("triton", "hopper")}
    best = min(ours, key=lambda name: ours[name])
    return record.row(
        case={**asdict(case), "ranks": place.world}, weave_us=ours[best], baselines=us, bound_us=layer.bound_us,
        parameters={"kernels": best, **{f"us {name}": round(value, 1) for name, value in ours.items()}},
    )  # fmt: skip


def cases(asked: Asked) -> list[Case]:
    if max(asked.of(TOKENS)) > MOST_TOKENS:
        raise UsageError(f"--set tokens: up to {MOST_TOKENS} tokens of a rank have room")
    return product(Case, asked.of(MODEL), asked.of(TOKENS), asked.of(ROUTINGS))


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    # One arena for all that is captured: graphs hold its addresses.
    needed = {case.model: exchange_call(case, place, ExpertsKernel.HOPPER) for case in cases}
    plan = memory_plan(place.group, [(call, SITES[call.fabric].buffers(call)) for call in needed.values()])
    peer.reserve(topology.discover(place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)
    for model in needed:
        weights = make_weights(MODELS[model], place)
        for case in (case for case in cases if case.model == model):
            yield row_of(case, weights, place)
        del weights
        torch.cuda.empty_cache()


MODEL = Setting("models", tuple(MODELS), quick=("qwen3-30b-a3b",), among=tuple(MODELS))
SUITES = (
    Suite(
        "moe_sharded", "a mixture's tokens sharded over the GPUs of one host", Needs(GPU, 2), cases, rows,
        ours=("triton", "hopper"), baselines=("all_to_all", "all_gather", "gather_experts"),
        bound="the largest of active weights, FLOPs and what crosses a link", settings=(MODEL, TOKENS, ROUTINGS),
    ),
)  # fmt: skip
