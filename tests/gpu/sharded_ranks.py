"""One rank of `test_moe_sharded_gpu`: `expert_exchange` on the fabric `peer` against the reference, and from graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

import weaveopt.ops  # noqa: F401  (registers torch.ops.weave)
from benchmarks.ranks import Place, barrier, run_and_exit
from benchmarks.timing import capture as captured
from tests.graphs.experts_cases import Sizes, make_operands
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import WeaveError
from weaveopt.fabrics import peer, topology
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.expert_ranges import whole
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands
from weaveopt.ops.experts.sharded.op import SITES, traffic
from weaveopt.records.candidate import Fabric

TIMEOUT_S = 40.0
MAX_TOKENS = 1100
REPLAYS = 300


@dataclass(frozen=True)
class Form:
    """Computation of the experts, and its sizes."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    bias: bool = False
    transposed: bool = False
    """As gpt-oss stores its weights."""
    choices: int = 2
    experts: int = 4
    """Experts of one rank."""
    hidden: int = 256
    inner: int = 128
    dtype: str = "bfloat16"
    weights_in_fp32: bool = False
    limit: float = 0.0


PLAIN = Form()
GPT_OSS = Form(
    "clamped_swish", interleaved=True, bias=True, transposed=True, choices=4, hidden=2880, inner=360, limit=7
)
MANY = Form(choices=8, experts=16, hidden=1024, inner=384, weights_in_fp32=True)
ONE = Form("relu", gated=False, bias=True, choices=1, experts=1, hidden=264, inner=72, dtype="float16")
ODD = Form("gelu", gated=False, choices=3, experts=5, hidden=1032, inner=200)
SIX = Form("gelu_tanh", choices=6, experts=7, hidden=520, inner=136, dtype="float16", weights_in_fp32=True)
WIDE = Form(choices=7, experts=3, hidden=6144, inner=64)
FORMS = (PLAIN, GPT_OSS, MANY, ONE, ODD, SIX, WIDE, replace(PLAIN, choices=5, dtype="float16"))
BY_TRITON = (PLAIN, GPT_OSS, ONE)
"""Also through the Triton kernels, each of which takes a second to compile."""
TOKENS = (1, 37, 300, 1000)
"""Token counts, the same on every rank."""
COUNTS = ((0, 5), (64, 1), (0, 0), (7, 600))
"""Token counts of ranks that hold batches of their own; further ranks have the last."""
AMONG_LARGE = ((64, 1), (MAX_TOKENS + 9, 7), (64, 1), (0, MAX_TOKENS + 1), (0, 0), (MAX_TOKENS, 0), (5, MAX_TOKENS + 3))
"""The same, in a row: some have more tokens than were planned for."""
ROUTINGS = ("uniform", "skewed", "last rank", "first expert", "some foreign", "all foreign", "repeated")


def call_of(form: Form, place: Place, kernels: ExpertsKernel, same_tokens: bool = True) -> ExpertExchangeCall:
    return ExpertExchangeCall(
        site=f"{form}/{kernels}/{same_tokens}", group=place.group, fabric=Fabric.PEER, world=place.world,
        hidden=form.hidden, dtype=form.dtype, max_tokens=MAX_TOKENS, timeout_s=TIMEOUT_S, num_experts=form.experts,
        choices=form.choices, activation=form.activation, gated=form.gated, interleaved=form.interleaved, alpha=1.702,
        limit=form.limit, same_tokens=same_tokens, kernels=kernels.value,
    )  # fmt: skip


def experts_call(form: Form) -> ExpertsCall:
    return ExpertsCall(form.activation, form.gated, form.interleaved, 1.702, form.limit)


def chosen(routing: str, tokens: int, form: Form, world: int, random: torch.Generator) -> Tensor:
    """Ids over all ranks."""
    whole, most = (tokens, form.choices), form.experts * world

    def between(first: int, end: int) -> Tensor:
        return torch.randint(first, end, whole, generator=random)

    if routing == "uniform":
        # No expert twice, as routers choose.
        scores = torch.rand((tokens, most), generator=random)
        return scores.topk(form.choices).indices if form.choices <= most else between(0, most)
    if routing == "skewed":
        return torch.where(torch.rand(whole, generator=random) < 0.6, 0, between(0, most))
    if routing == "last rank":
        return between(most - form.experts, most)
    if routing == "first expert":
        return torch.zeros(whole, dtype=torch.int64)
    if routing == "some foreign":
        return between(-most, 2 * most)
    if routing == "all foreign":
        return torch.where(torch.rand(whole, generator=random) < 0.5, -1, most)
    assert routing == "repeated", routing
    return torch.randint(0, most, (tokens, 1), generator=random).expand(whole).contiguous()


@dataclass(frozen=True)
class Case:
    """Inputs of all ranks, of which this one keeps its own, and what it should get."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    operands: ExpertWeights
    wanted: Tensor
    pushed: int
    """Rows of this rank's tokens that other ranks need."""
    returned: int

    def run(self, call: ExpertExchangeCall) -> Tensor:
        result: Tensor = torch.ops.weave.expert_exchange(
            self.x, self.experts, self.weights, *self.operands, call.encode()
        )
        return result


def make_case(form: Form, routing: str, counts: Sequence[int], place: Place, seed: int) -> Case:
    world, end = place.world, sum(counts[: place.rank + 1])
    mine = slice(end - counts[place.rank], end)
    sizes = Sizes(
        sum(counts), form.choices, form.experts * world, form.hidden, form.inner, form.bias, form.transposed,
        form.weights_in_fp32,
    )  # fmt: skip
    call, dtype = experts_call(form), getattr(torch, form.dtype)
    every = make_operands(sizes, call, dtype, seed, device="cuda")
    random = torch.Generator().manual_seed(seed)
    experts = chosen(routing, sum(counts), form, world, random).cuda()[mine]
    weights = every.weights[mine]
    # What is no rank's expert adds nothing, whatever its weight.
    is_someones = (experts >= 0) & (experts < sizes.experts)
    weights = weights.masked_fill(~is_someones, math.nan)
    x = every.x[mine]
    wanted = x.new_empty(x.shape)
    if len(x):
        wanted = reference(
            ExpertOperands(x, experts, weights, every.gate_up, every.gate_up_bias, every.down, every.down_bias), call
        )
    own = slice(place.rank * form.experts, (place.rank + 1) * form.experts)
    operands = ExpertWeights(
        whole(every.gate_up)[own],
        None if every.gate_up_bias is None else every.gate_up_bias[own],
        whole(every.down)[own],
        None if every.down_bias is None else every.down_bias[own],
    )
    owner = torch.where(is_someones, experts // form.experts, -1)
    elsewhere = [rank for rank in range(world) if rank != place.rank]
    pushed = sum(int((owner == rank).any(-1).sum()) for rank in elsewhere)
    return Case(x, experts, weights, operands, wanted, pushed, sum(int((owner == rank).sum()) for rank in elsewhere))


def poison(place: Place) -> None:
    """NaN in all that ranks push, on every rank, while no call runs."""
    barrier()
    memory = peer.of(place.group)
    for name in ("moe_dispatch", "moe_combine"):
        buffer = memory.buffer(name)
        memory.tensor(buffer.offset, (buffer.num_bytes,), torch.uint8).fill_(0xFF)
    torch.cuda.synchronize()
    barrier()


def reserve(place: Place) -> None:
    calls = [call_of(form, place, ExpertsKernel.HOPPER) for form in FORMS]
    plan = memory_plan(place.group, [(call, SITES[call.fabric].buffers(call)) for call in calls])
    peer.reserve(topology.discover(place.group, TIMEOUT_S), plan, 0, TIMEOUT_S)


def check(form: Form, routing: str, counts: Sequence[int], place: Place, kernels: ExpertsKernel, same: bool) -> None:
    call = call_of(form, place, kernels, same)
    case = make_case(form, routing, counts, place, seed=sum(counts) + len(routing))
    what = f"{routing}, {counts} tokens, {kernels}, {form}, rank {place.rank}"
    poison(place)
    if place.rank:
        torch.cuda._sleep(200_000)
    text = call.encode()
    for _ in range(2):
        before = traffic(text, "cuda")
        got = case.run(call)
        assert_close(got, case.wanted, KERNEL, what, got.dtype)
        after = traffic(text, "cuda")
        assert before is not None and after is not None
        moved = (after.dispatched - before.dispatched, after.returned - before.returned)
        # More tokens than were planned for go through the library, on all ranks.
        pushed = (case.pushed, case.returned) if max(counts) <= MAX_TOKENS else (0, 0)
        assert moved == pushed, f"{what}: {moved} rows, not {pushed}"
    again = case.run(call)
    assert torch.equal(again, got), f"{what}: other bits in another run"


def cases() -> Iterator[tuple[Form, str, int]]:
    for at, form in enumerate(FORMS):
        for turn, routing in enumerate(ROUTINGS):
            yield form, routing, TOKENS[(at + turn) % len(TOKENS)]
    for tokens in TOKENS:
        yield PLAIN, "uniform", tokens
        yield GPT_OSS, "skewed", tokens


def grid(place: Place) -> None:
    for form, routing, tokens in cases():
        check(form, routing, [tokens] * place.world, place, ExpertsKernel.HOPPER, same=True)
    for form in BY_TRITON:
        more = (("some foreign", 1), ("last rank", 1000)) if form is PLAIN else ()
        for routing, tokens in (("uniform", 37), ("skewed", 300), *more):
            check(form, routing, [tokens] * place.world, place, ExpertsKernel.TRITON, same=True)


def own_batches(place: Place) -> None:
    """Each source has room for as many tokens as the rank has that has most."""
    for form in (PLAIN, ONE):
        for few, many in COUNTS:
            counts = [few] + [many] * (place.world - 1)
            for routing in ("uniform", "last rank"):
                check(form, routing, counts, place, ExpertsKernel.HOPPER, same=False)
    for few, many in AMONG_LARGE:
        check(PLAIN, "uniform", [few] + [many] * (place.world - 1), place, ExpertsKernel.HOPPER, same=False)


def own_batches_in_a_row(place: Place) -> None:
    """Calls that nothing separates, with devices at any time: hosts are ahead of them, as far as they may be."""
    call, random = call_of(PLAIN, place, ExpertsKernel.HOPPER, same_tokens=False), Random(place.world)
    every = [[random.choice((0, 1, 33, 400, MAX_TOKENS)) for _ in range(place.world)] for _ in range(12)]
    every[7][place.world - 1] = MAX_TOKENS + 1
    cases = [make_case(PLAIN, "uniform", counts, place, seed) for seed, counts in enumerate(every)]
    wanted = [case.run(call) for case in cases]
    for case, got in zip(cases, wanted, strict=True):
        assert_close(got, case.wanted, KERNEL, f"{len(case.x)} tokens, rank {place.rank}", got.dtype)
    for turn in range(20):
        if turn % 7 == place.rank:
            torch.cuda._sleep(3_000_000)
        for at, case in enumerate(cases):
            assert torch.equal(case.run(call), wanted[at]), f"turn {turn}: {every[at]} tokens, rank {place.rank}"


def own_batches_in_a_graph(place: Place) -> None:
    """A capture ends with an error that says why, on every rank, and later calls succeed."""
    call = call_of(PLAIN, place, ExpertsKernel.HOPPER, same_tokens=False)
    case = make_case(PLAIN, "uniform", [4] * place.world, place, 1)
    torch.cuda.synchronize()
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            case.run(call)
    except WeaveError as error:
        said = str(error)
    assert "cannot hold the call: its ranks hold batches of their own" in said, said
    assert_close(case.run(call), case.wanted, KERNEL, "behind a capture", case.wanted.dtype)


def no_tokens(place: Place) -> None:
    call = call_of(PLAIN, place, ExpertsKernel.HOPPER)
    case = make_case(PLAIN, "uniform", [0] * place.world, place, 1)
    assert case.run(call).shape == (0, PLAIN.hidden)


def replays(place: Place, form: Form, kernels: ExpertsKernel, tokens: Sequence[int]) -> None:
    """A graph of calls with different token counts, whose inputs change from replay to replay, with ranks at any time:
    the bits of the same calls outside of a graph."""
    call = call_of(form, place, kernels)
    sets = [
        [make_case(form, routing, [count] * place.world, place, seed) for count in tokens]
        for seed, routing in enumerate(("uniform", "last rank", "first expert", "some foreign"))
    ]
    # Weights stay where they are; those of the first set are everybody's.
    static = [replace(case, x=case.x.clone(), experts=case.experts.clone(), weights=case.weights.clone())
              for case in sets[0]]  # fmt: skip
    sets = [[replace(case, operands=first.operands) for case, first in zip(cases, static, strict=True)]
            for cases in sets]  # fmt: skip
    wanted = [[case.run(call) for case in cases] for cases in sets]
    found: list[Tensor] = []

    def step() -> None:
        found[:] = [case.run(call) for case in static]

    graph = captured(step, torch.cuda.graph_pool_handle())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(REPLAYS):
        at = turn % len(sets)
        for case, inputs in zip(static, sets[at], strict=True):
            case.x.copy_(inputs.x)
            case.experts.copy_(inputs.experts)
            case.weights.copy_(inputs.weights)
        if turn % 7 == place.rank:
            torch.cuda._sleep(100_000)
        graph.replay()
        for got, want in zip(found, wanted[at], strict=True):
            wrong += (got.view(torch.int16) != want.view(torch.int16)).any()
        if turn % 32 == 31:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} results of {REPLAYS} replays have other bits: {form}, {kernels}"
    barrier()


def timed(name: str, run: Callable[[], None], place: Place) -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    place.say(f"{name}: {begin.elapsed_time(end) / 1e3:.1f} s")


def program(place: Place) -> None:
    with torch.no_grad():
        reserve(place)
        timed("grid", lambda: grid(place), place)
        timed("batches of their own", lambda: own_batches(place), place)
        timed("batches of their own in a row", lambda: own_batches_in_a_row(place), place)
        own_batches_in_a_graph(place)
        no_tokens(place)
        timed("replays", lambda: replays(place, PLAIN, ExpertsKernel.HOPPER, (64, 5, 300)), place)
        timed("replays, many experts", lambda: replays(place, MANY, ExpertsKernel.HOPPER, (256, 1)), place)
        timed("replays, Triton", lambda: replays(place, PLAIN, ExpertsKernel.TRITON, (37, 1)), place)
    barrier()
    print("sharded tokens agree", flush=True)


if __name__ == "__main__":
    run_and_exit(program)
