"""`weave::expert_exchange` on spawned CPU ranks: against one process that has all tokens, and the rows that
are sent."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weaveopt.ops  # noqa: F401
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks import run_ranks
from weaveopt import _native
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.rows_call import memory_plan
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.experts.by_expert import ExpertWeights
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.exchange.library import combine
from weaveopt.ops.experts.exchange.reference import reference
from weaveopt.ops.experts.sharded.op import SITES, traffic
from weaveopt.records.candidate import Fabric

WORLDS = (1, 2, 3, 4)
MAX_TOKENS = 24


@dataclass(frozen=True)
class Form:
    """Computation of the experts, and the distribution of the tokens."""

    activation: str = "silu"
    gated: bool = True
    interleaved: bool = False
    bias: bool = False
    transposed: bool = False
    """As gpt-oss stores its weights."""
    choices: int = 2
    experts: int = 2
    """Experts of one rank."""
    batches: int = 2


FORMS = (
    Form(),
    Form("gelu_tanh", choices=4, batches=1),
    Form("clamped_swish", interleaved=True, bias=True, transposed=True, choices=3, batches=8),
    Form("relu", gated=False, bias=True, choices=1, experts=1),
    Form("gelu", gated=False, experts=5, choices=3, batches=3),
)
COUNTS = ("even", "uneven", "some none", "one has all", "none")
"""Tokens of the ranks."""
ROUTINGS = ("uniform", "all on the last rank", "foreign ids")
DTYPES = ("float32", "bfloat16", "float16")


def make_call(form: Form, dtype: str, world: int, hidden: int = 32, group: str = "0") -> ExpertExchangeCall:
    return ExpertExchangeCall(
        site=f"{form}/{dtype}/{hidden}", group=group, fabric=Fabric.SHM, world=world, hidden=hidden, dtype=dtype,
        max_tokens=MAX_TOKENS, timeout_s=30.0, num_experts=form.experts, choices=form.choices,
        activation=form.activation, gated=form.gated, interleaved=form.interleaved, alpha=1.702, limit=0.5,
        batches=form.batches, same_tokens=True,
    )  # fmt: skip


def tokens_of(counts: str, rank: int, world: int) -> int:
    return {
        "even": 7,
        "uneven": 1 + 5 * rank,
        "some none": 0 if rank % 2 else 9,
        "one has all": MAX_TOKENS if rank == world - 1 else 0,
        "none": 0,
    }[counts]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one rank."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    operands: ExpertWeights

    def run(self, call: ExpertExchangeCall) -> Tensor:
        result: Tensor = torch.ops.weave.expert_exchange(
            self.x, self.experts, self.weights, *self.operands, call.encode()
        )
        return result


def make_inputs(form: Form, call: ExpertExchangeCall, counts: str, routing: str, seed: int) -> list[Inputs]:
    """Inputs of all ranks; every rank makes the same."""
    random = torch.Generator().manual_seed(seed)
    dtype, hidden, inner, total = getattr(torch, call.dtype), call.hidden, 24, call.world * form.experts

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*sizes, generator=random) * scale).to(dtype)

    def matrix(rows: int, columns: int) -> Tensor:
        if form.transposed:
            return tensor(form.experts, columns, rows, scale=columns**-0.5).transpose(1, 2)
        return tensor(form.experts, rows, columns, scale=columns**-0.5)

    found = []
    for rank in range(call.world):
        tokens = tokens_of(counts, rank, call.world)
        low, high = (-1, total + 2) if routing == "foreign ids" else (0, total)
        if routing == "all on the last rank":
            low = total - form.experts
        experts = torch.randint(low, high, (tokens, form.choices), generator=random)
        weights = torch.rand(tokens, form.choices, generator=random)
        gates = 2 * inner if form.gated else inner
        operands = ExpertWeights(
            matrix(gates, hidden),
            tensor(form.experts, gates, scale=0.1) if form.bias else None,
            matrix(hidden, inner),
            tensor(form.experts, hidden, scale=0.1) if form.bias else None,
        )
        found.append(Inputs(tensor(tokens, hidden), experts, weights, operands))
    return found


def wanted(inputs: list[Inputs], call: ExpertExchangeCall) -> list[Tensor]:
    return reference(
        [each.x for each in inputs], [each.experts for each in inputs], [each.weights for each in inputs],
        [each.operands for each in inputs], call,
    )  # fmt: skip


def reserve(calls: list[ExpertExchangeCall]) -> ShmArena:
    group = calls[0].group
    plan = memory_plan(group, [(call, SITES[Fabric.SHM].buffers(call)) for call in calls])
    return shm.reserve(topology.discover(group, 30.0), plan, 0, 30.0)


def reserve_for(world: int, group: str = "0") -> ShmArena:
    return reserve([replace(make_call(FORMS[1], "float32", world, 200, group), site="reserved")])


def fill_with_nan(memory: ShmArena) -> None:
    dist.barrier()  # a peer may still read
    memory.tensor(0, (memory.num_bytes,), torch.uint8).fill_(0xFF)
    dist.barrier()


def digest(result: Tensor) -> str:
    return hashlib.sha1(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def expected_rows(inputs: list[Inputs], rank: int, num_experts: int) -> tuple[int, int]:
    """Row counts of a rank: rows dispatched, one for each (token, other rank), and returned, one for each remote
    choice."""
    world = len(inputs)
    owners = [torch.div(each.experts, num_experts, rounding_mode="floor") for each in inputs]
    pushed = sum(len({*row} & {*range(world)} - {rank}) for row in owners[rank].tolist())
    returned = sum(int((each == rank).sum()) for at, each in enumerate(owners) if at != rank)
    return pushed, returned


def run_grid(rank: int, world: int) -> int:
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    memory, count = reserve_for(world), 0
    for index, (form, counts, dtype) in enumerate(itertools.product(FORMS, COUNTS, DTYPES)):
        routing, hidden = ROUTINGS[index % 3], (32, 50)[index % 2]
        call = make_call(form, dtype, world, hidden)
        inputs = make_inputs(form, call, counts, routing, seed=index)
        if index % 5 == 0:
            fill_with_nan(memory)
        before = traffic(call.encode())
        got, want = inputs[rank].run(call), wanted(inputs, call)[rank]
        after = traffic(call.encode())
        assert before is not None and after is not None
        moved = (after.dispatched - before.dispatched, after.returned - before.returned)
        assert moved == expected_rows(inputs, rank, form.experts), f"{routing}, {counts}: one row per destination"
        what = f"{counts}, {routing}, {call}"
        assert_close(got, want, KERNEL, what, getattr(torch, dtype))
        assert digest(inputs[rank].run(call)) == digest(got), f"two runs differ: {what}"
        if index % 3 == 0:
            library = inputs[rank].run(replace(call, fabric=Fabric.LIBRARY, max_tokens=0))
            assert_close(library, want, KERNEL, f"library: {what}", getattr(torch, dtype))
        count += 1
    return count


@pytest.mark.parametrize("world", WORLDS)
def test_equals_the_reference(world: int) -> None:
    assert run_ranks(run_grid, world, world, timeout_s=240) == [len(FORMS) * len(COUNTS) * len(DTYPES)] * world


def exact(form: Form, call: ExpertExchangeCall, seed: int) -> list[Inputs]:
    """Inputs of small integers: every GEMM is exact whatever its shape, so only the order of sums is left to differ."""
    found = []
    for each in make_inputs(form, call, "uneven", "foreign ids", seed):
        gate_up, _, down, _ = ((4 * w).round() if w is not None else None for w in each.operands)
        assert gate_up is not None and down is not None
        found.append(replace(each, x=(2 * each.x).round(), operands=ExpertWeights(gate_up, None, down, None)))
    return found


def run_bitwise(rank: int, world: int) -> None:
    reserve_for(world)
    for seed, dtype in enumerate(DTYPES):
        form = Form("relu", gated=False, choices=4, experts=3, batches=2)
        call = make_call(form, dtype, world)
        inputs = exact(form, call, seed)
        want = wanted(inputs, call)[rank]
        for batches in (1, 2, world):
            got = inputs[rank].run(replace(call, batches=batches))
            assert digest(got) == digest(want), f"{dtype}, {batches} batches"


def test_sums_in_the_order_of_the_choices() -> None:
    run_ranks(run_bitwise, 3, 3)


def run_instruction_sets(rank: int) -> None:
    """Sums of products are those of torch in every bit, whatever the vectors: rows and weights that cancel."""
    memory = reserve_for(1)
    random = torch.Generator().manual_seed(5)
    for dtype, hidden, choices in itertools.product(some(DTYPES), (1, 37, 200), (1, 4)):
        call = replace(make_call(Form(choices=choices), dtype, 1, hidden), site="instruction sets")
        rows = torch.randn(MAX_TOKENS * choices, hidden, generator=random).to(getattr(torch, dtype))
        weights = torch.randn(MAX_TOKENS, choices, generator=random)
        ids = torch.zeros(MAX_TOKENS, choices, dtype=torch.int64)
        ids[3] = -1
        want = combine(rows.view(MAX_TOKENS, choices, hidden).masked_fill((ids < 0)[..., None], 0), ids >= 0, weights)
        for isa in some(_native.isas()):
            site = _native.ShardedMixtureSite()
            needs = SITES[Fabric.SHM].buffers(call)
            site.dispatch_offset, site.combine_offset = (memory.buffer(need.name).offset for need in needs)
            site.max_tokens, site.choices, site.num_experts = MAX_TOKENS, choices, 1
            site.hidden, site.dtype = hidden, getattr(_native.DType, dtype)
            native = _native.ShardedMixture(memory.native, site, isa)
            native.enter()
            native.dispatch(rows.data_ptr(), ids.data_ptr(), MAX_TOKENS, 1)
            code, num_routes = native.collect(0, 1)
            assert (code, num_routes) == (0, (MAX_TOKENS - 1) * choices)
            at = memory.buffer(needs[1].name).offset  # as if the experts had sent them home
            memory.tensor(at, tuple(rows.shape), rows.dtype).copy_(rows)
            out = torch.empty(MAX_TOKENS, hidden, dtype=rows.dtype)
            native.finish(weights.data_ptr(), out.data_ptr(), 1)
            assert digest(out) == digest(want), f"{isa}, {dtype}, {hidden}"


def test_every_instruction_set_makes_the_same_sums() -> None:
    run_ranks(run_instruction_sets, 1)


def run_too_many(rank: int, world: int) -> None:
    """One rank has more tokens than were planned for: all go through the library, and the next call does not."""
    reserve_for(world)
    form = Form(choices=2)
    call = make_call(form, "bfloat16", world)
    few = replace(call, max_tokens=6)
    for seed in range(8):
        inputs = make_inputs(form, call, "uneven", "uniform", seed)  # the last ranks have more than 6
        before = traffic(few.encode())
        got = inputs[rank].run(few)
        want = inputs[rank].run(replace(call, fabric=Fabric.LIBRARY))
        assert torch.equal(got, want), seed
        after = traffic(few.encode())
        assert before is not None and after is not None
        fits = tokens_of("uneven", rank, world) <= few.max_tokens
        pushed = expected_rows(inputs, rank, form.experts)[0] if fits else 0
        assert after.dispatched - before.dispatched == pushed, "a rank with too many tokens pushes none"
        small = [Inputs(e.x[:5], e.experts[:5], e.weights[:5], e.operands) for e in inputs]
        assert_close(small[rank].run(few), wanted(small, few)[rank], KERNEL, f"seed {seed}", torch.bfloat16)
        ours = traffic(few.encode())
        assert ours is not None and ours.dispatched - after.dispatched == expected_rows(small, rank, 2)[0]


def test_more_tokens_than_planned_go_through_the_library() -> None:
    run_ranks(run_too_many, 3, 3)


def run_eight(rank: int) -> None:
    reserve_for(8)
    form = Form(choices=4, experts=1, batches=8)
    call = make_call(form, "float32", 8)
    for seed, counts in enumerate(some(COUNTS * 3)):
        inputs = make_inputs(form, call, counts, ROUTINGS[seed % 3], seed)
        assert_close(inputs[rank].run(call), wanted(inputs, call)[rank], KERNEL, counts, torch.float32)


def test_eight_ranks() -> None:
    run_ranks(run_eight, 8, timeout_s=240)


def run_groups(rank: int) -> None:
    """Two sub-groups at once, then their ranks across; and another operation of the group between the calls."""
    for ranks_of in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        groups = [dist.new_group(ranks) for ranks in ranks_of]
        at = next(index for index, ranks in enumerate(ranks_of) if rank in ranks)
        name, own = groups[at].group_name, ranks_of[at].index(rank)
        reserve_for(2, name)
        for seed in range(12):
            form = FORMS[seed % len(FORMS)]
            call = make_call(form, "bfloat16", 2, group=name)
            inputs = make_inputs(form, call, COUNTS[seed % len(COUNTS)], "uniform", 10 * at + seed)
            want = wanted(inputs, call)[own]
            assert_close(inputs[own].run(call), want, KERNEL, f"{ranks_of[at]}, {call}", torch.bfloat16)
            library = inputs[own].run(replace(call, fabric=Fabric.LIBRARY))
            assert_close(library, want, KERNEL, f"library: {ranks_of[at]}, {call}", torch.bfloat16)


def test_sub_groups() -> None:
    run_ranks(run_groups, 4)


def run_special_values(rank: int) -> None:
    """A row that is not finite stays its token's, and a choice of no rank's expert adds nothing whatever its weight."""
    reserve_for(2)
    form = Form("relu", gated=False, choices=2, experts=1)
    call = make_call(form, "float32", 2)
    inputs = make_inputs(form, call, "even", "uniform", seed=3)
    for each in inputs:
        each.x[1] = float("inf")
        each.experts[2] = torch.tensor([-1, 2])
        each.experts[3, 1] = 77
        each.weights[2] = float("nan")
        each.weights[3, 1] = float("inf")
    want = wanted(inputs, call)[rank]
    for fabric in (Fabric.SHM, Fabric.LIBRARY):
        got = inputs[rank].run(replace(call, fabric=fabric))
        assert got[2].eq(0).all() and got[[0, 2, 3, 4, 5, 6]].isfinite().all()
        torch.testing.assert_close(got, want, equal_nan=True)


def test_special_values() -> None:
    run_ranks(run_special_values, 2)
