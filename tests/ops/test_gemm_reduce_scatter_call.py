"""`weave::gemm_reduce_scatter` on spawned ranks against the one reference; new memory and the arena hold NaN."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt.errors import WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.rows_call import decode, memory_plan
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.gemm_comm.reduce_scatter.call import GemmReduceScatterCall, Products
from weaveopt.ops.gemm_comm.reduce_scatter.op import SITES
from weaveopt.ops.gemm_comm.reduce_scatter.reference import reference
from weaveopt.records.candidate import Fabric

WORLDS = (2, 3, 4)
DTYPES = ("bfloat16", "float16", "float32")
INNERS = (0, 1, 7, 33)
"""Rows of a rank in one block."""
MAX_TOKENS = 33 * 3 * 4
K = 24


@dataclass(frozen=True)
class Form:
    outer: int = 1
    columns: bool = False
    num_gemms: int = 1
    addends: str = ""
    """`row`, `full` or both."""
    scale: float = 1.0
    strided: bool = False


FORMS = (
    Form(),
    Form(outer=3),
    Form(columns=True),
    Form(num_gemms=3, strided=True),
    Form(addends="row", scale=0.25),
    Form(outer=2, num_gemms=2, addends="row full"),
    Form(columns=True, addends="full", scale=0.5, strided=True),
)


def make_call(form: Form, hidden: int, dtype: str, world: int, group: str = "0") -> GemmReduceScatterCall:
    return GemmReduceScatterCall(
        site=f"{form}", group=group, fabric=Fabric.SHM, world=world, hidden=hidden, dtype=dtype, max_tokens=MAX_TOKENS,
        timeout_s=30.0, scale=form.scale, columns=form.columns,
    )  # fmt: skip


def make_inputs(form: Form, tokens: int, hidden: int, dtype: str, world: int, seed: int) -> list[Products]:
    """GEMM operands and addends of every rank."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*(shape[::-1] if form.strided else shape), generator=random) * scale
        return (drawn.t() if form.strided and len(shape) == 2 else drawn).to(getattr(torch, dtype))

    return [
        Products(
            [tensor(tokens, K + at) for at in range(form.num_gemms)],
            [tensor(K + at, hidden, scale=K**-0.5) for at in range(form.num_gemms)],
            [tensor(hidden) if word == "row" else tensor(tokens, hidden) for word in form.addends.split()],
        )
        for _ in range(world)
    ]


def run_op(own: Products, outer: int, call: GemmReduceScatterCall) -> Tensor:
    result: Tensor = torch.ops.weave.gemm_reduce_scatter(*map(list, own), outer, call.encode())
    return result


def reserve(world: int, group: str = "0") -> ShmArena:
    widest = make_call(Form(), 1000, "float32", world, group)
    plan = memory_plan(group, [(widest, SITES[Fabric.SHM].buffers(widest))])
    return shm.reserve(topology.discover(group, 30.0), plan, 0, 30.0)


def fill_with_nan(memory: ShmArena) -> None:
    dist.barrier()  # a peer may still read
    memory.tensor(0, (memory.num_bytes,), torch.uint8).fill_(0xFF)
    dist.barrier()


def digest(result: Tensor) -> str:
    return hashlib.sha1(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def run_grid(rank: int, world: int) -> int:
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    memory = reserve(world)
    count = 0
    for index, (inner, form, dtype) in enumerate(itertools.product(INNERS, FORMS, DTYPES)):
        for hidden in (8 * world, 250 * world):
            tokens = inner * form.outer * (1 if form.columns else world)
            call = make_call(form, hidden, dtype, world)
            inputs = make_inputs(form, tokens, hidden, dtype, world, seed=index)
            if index % 5 == 0:
                fill_with_nan(memory)
            outer = 1 if form.columns else form.outer
            got = run_op(inputs[rank], outer, call)
            want = reference([each.compute() for each in inputs], outer, call)[rank]
            assert got.is_contiguous()
            assert_close(got, want, KERNEL, f"{inner} rows, {hidden} columns, {call}")
            assert digest(run_op(inputs[rank], outer, call)) == digest(got), f"two runs differ: {call}"
            if index % 4 == 0:
                through = run_op(inputs[rank], outer, replace(call, fabric=Fabric.LIBRARY))
                assert_close(through, want, LIBRARY, f"library: {inner} rows, {call}", getattr(torch, dtype))
                if tokens:
                    more = run_op(inputs[rank], outer, replace(call, max_tokens=tokens - 1))
                    assert torch.equal(more, through), "more rows than were planned for go through it"
            count += 1
    return count


@pytest.mark.parametrize("world", WORLDS)
def test_equals_the_reference(world: int) -> None:
    assert run_ranks(run_grid, world, world, timeout_s=240) == [len(FORMS) * len(DTYPES) * len(INNERS) * 2] * world


def run_sum_order(rank: int) -> None:
    """Partial results that cancel: only the order of the ranks, in fp32 and rounded once, makes this."""
    reserve(4)
    call = make_call(Form(), 8, "bfloat16", 4)
    values = (1.0, 2.0**-9, 2.0**-9, -1.0)
    a = torch.full((4, 1), values[rank], dtype=torch.bfloat16)
    got = run_op(Products([a], [torch.ones(1, 8, dtype=torch.bfloat16)]), 1, call)
    assert torch.equal(got, torch.full((1, 8), 2.0**-8, dtype=torch.bfloat16)), got


def run_special_values(rank: int) -> None:
    reserve(4)
    call = make_call(Form(), 8, "float32", 4)
    a = torch.zeros(4, 1) + (0.0 if rank else -0.0)
    row = torch.tensor([[1.0, -1.0, float("inf"), float("nan"), 0.0, -0.0, 1e-42, 3e38]])
    got = run_op(Products([a + 1.0], [row if rank == 2 else torch.zeros(1, 8)]), 1, call)
    torch.testing.assert_close(got, row + 0.0, rtol=0, atol=0, equal_nan=True)


def run_groups(rank: int) -> None:
    """Two sub-groups at once, then their ranks across."""
    for ranks_of in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        groups = [dist.new_group(ranks) for ranks in ranks_of]
        at = next(index for index, ranks in enumerate(ranks_of) if rank in ranks)
        name, own = groups[at].group_name, ranks_of[at].index(rank)
        reserve(2, name)
        for seed in range(20):
            form = FORMS[seed % len(FORMS)]
            outer = 1 if form.columns else form.outer
            call = make_call(form, 64, "bfloat16", 2, name)
            inputs = make_inputs(form, 12 * form.outer, 64, "bfloat16", 2, seed=10 * at + seed)
            want = reference([each.compute() for each in inputs], outer, call)[own]
            assert_close(run_op(inputs[own], outer, call), want, KERNEL, f"{ranks_of[at]}, {call}")


def run_of_four(rank: int) -> None:
    run_sum_order(rank)
    run_special_values(rank)
    run_groups(rank)


def test_order_of_sums_special_values_and_groups() -> None:
    run_ranks(run_of_four, 4)


def step(a: Tensor, b: Tensor, call: str) -> Tensor:
    return torch.ops.weave.gemm_reduce_scatter([a * 2], [b.t()], [], 1, call) + 1  # type: ignore[no-any-return]


def run_compiled(rank: int, world: int) -> None:
    """Under Inductor with a symbolic number of rows, and threads."""
    assert torch.get_num_threads() == 3
    reserve(world)
    call = make_call(Form(), 64, "float32", world).encode()
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    for rows in (4, 10, 66, MAX_TOKENS + 2):
        own = torch.Generator().manual_seed(rank)
        a, b = torch.randn(rows, 16, generator=own), torch.randn(64, 16, generator=own)
        with torch.no_grad():
            got = compiled(a, b, call)
        want = step(a, b.requires_grad_(), call)
        assert_close(got, want.detach(), KERNEL, f"{rows} rows")


def test_compiles_with_symbolic_rows() -> None:
    run_ranks(run_compiled, 2, 2, threads=3)


def run_opcheck(rank: int) -> None:
    reserve(1)
    for form in FORMS:
        [own] = make_inputs(form, 6 * form.outer, 64, "bfloat16", 1, seed=1)
        args = (*map(list, own), 1 if form.columns else form.outer, make_call(form, 64, "bfloat16", 1).encode())
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.weave.gemm_reduce_scatter.default, args, test_utils=checks)


def test_opcheck() -> None:
    run_ranks(run_opcheck, 1)


def test_fake_results_have_the_shape_of_the_reference() -> None:
    for form in FORMS:
        call, inputs = make_call(form, 64, "bfloat16", 2), make_inputs(form, 12, 64, "bfloat16", 2, seed=1)
        outer = 1 if form.columns else form.outer
        want = reference([each.compute() for each in inputs], outer, call)[0]
        with FakeTensorMode(allow_non_fake_inputs=True):
            got = run_op(inputs[0], outer, call)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


def run_wrong_calls(rank: int) -> None:
    reserve(2)
    call = make_call(Form(), 64, "bfloat16", 2)
    [own, _] = make_inputs(Form(), 7, 64, "bfloat16", 2, seed=1)
    for wrong, outer, found in (
        (own, 1, "7 rows are not 1 block for each of 2 ranks"),
        (own._replace(b=[own.b[0][:, :32]]), 1, "32 columns"),
        (own._replace(a=[own.a[0][:6].float()]), 1, "float32"),
    ):
        with pytest.raises(WeaveError, match=found):
            run_op(wrong, outer, call)
    # The group was given back: a right call runs.
    inputs = make_inputs(Form(), 8, 64, "bfloat16", 2, seed=1)
    want = reference([each.compute() for each in inputs], 1, call)[rank]
    assert_close(run_op(inputs[rank], 1, call), want, KERNEL)


def test_wrong_calls_are_refused_and_harm_nothing() -> None:
    run_ranks(run_wrong_calls, 2)


def test_call_survives_its_encoding() -> None:
    call = make_call(FORMS[4], 64, "bfloat16", 3)
    assert decode(GemmReduceScatterCall, call.encode()) == call
    with pytest.raises(WeaveError, match="not an encoded"):
        decode(GemmReduceScatterCall, "{}")
    with pytest.raises(WeaveError, match="dtype float64"):
        decode(GemmReduceScatterCall, replace(call, dtype="float64").encode())
