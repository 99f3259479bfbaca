"""`weave::all_gather_gemm` on spawned ranks against the one reference; new memory and the arena hold NaN."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks import run_ranks
from weaveopt.errors import AgreementError, WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.fabrics.rows_call import decode, memory_plan
from weaveopt.fabrics.shm import ShmArena
from weaveopt.ops.gemm_comm.all_gather.call import AllGatherGemmCall, Weights
from weaveopt.ops.gemm_comm.all_gather.op import SITES
from weaveopt.ops.gemm_comm.all_gather.reference import reference
from weaveopt.records.candidate import Fabric

WORLDS = (2, 3, 4)
DTYPES = ("bfloat16", "float16", "float32")
INNERS = (0, 1, 7, 33)
"""Rows of a rank in one block."""
MAX_TOKENS = 33 * 3 * 4


@dataclass(frozen=True)
class Form:
    outer: int = 1
    widths: tuple[int, ...] = (16,)
    addends: str = ""
    """`row` or `full`, of the first GEMM."""
    returns_rows: bool = False
    strided: bool = False


FORMS = (
    Form(),
    Form(outer=3, returns_rows=True),
    Form(widths=(8, 24, 1), addends="row"),
    Form(outer=2, widths=(40, 8), addends="full", strided=True),
    Form(returns_rows=True, strided=True),
)


def make_call(form: Form, hidden: int, dtype: str, world: int, group: str = "0") -> AllGatherGemmCall:
    return AllGatherGemmCall(
        site=f"{form}", group=group, fabric=Fabric.SHM, world=world, hidden=hidden, dtype=dtype, max_tokens=MAX_TOKENS,
        timeout_s=30.0, returns_rows=form.returns_rows,
    )  # fmt: skip


def make_inputs(
    form: Form, inner: int, hidden: int, dtype: str, world: int, seed: int
) -> tuple[list[Tensor], list[Weights]]:
    """Shards and weights of every rank."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*(shape[::-1] if form.strided else shape), generator=random) * scale
        return (drawn.t() if form.strided and len(shape) == 2 else drawn).to(getattr(torch, dtype))

    tokens = form.outer * inner * world
    sizes = {"": None, "row": (form.widths[0],), "full": (tokens, form.widths[0])}[form.addends]
    shards = [tensor(form.outer * inner, hidden) for _ in range(world)]
    weights = [
        Weights(
            [tensor(hidden, width, scale=hidden**-0.5) for width in form.widths],
            [tensor(*sizes) if at == 0 and sizes else None for at in range(len(form.widths))],
        )
        for _ in range(world)
    ]
    return shards, weights


def run_op(shard: Tensor, weights: Weights, outer: int, call: AllGatherGemmCall) -> list[Tensor]:
    results: list[Tensor] = torch.ops.weave.all_gather_gemm(shard, *map(list, weights), outer, call.encode())
    return results


def reserve(world: int, group: str = "0") -> ShmArena:
    widest = make_call(Form(), 1000, "float32", world, group)
    plan = memory_plan(group, [(widest, SITES[Fabric.SHM].buffers(widest))])
    return shm.reserve(topology.discover(group, 30.0), plan, 0, 30.0)


def fill_with_nan(memory: ShmArena) -> None:
    dist.barrier()  # a peer may still read
    memory.tensor(0, (memory.num_bytes,), torch.uint8).fill_(0xFF)
    dist.barrier()


def check(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert len(got) == len(want) and all(each.is_contiguous() for each in got)
    assert torch.equal(got[0], want[0]), f"rows of {what}"
    for each, expected in zip(got[1:], want[1:], strict=True):
        assert_close(each, expected, KERNEL, what)


def run_grid(rank: int, world: int) -> int:
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    memory = reserve(world)
    count = 0
    for index, (inner, form, dtype) in enumerate(itertools.product(INNERS, FORMS, DTYPES)):
        for hidden in (8, 250):
            call = make_call(form, hidden, dtype, world)
            shards, weights = make_inputs(form, inner, hidden, dtype, world, seed=index)
            if index % 5 == 0:
                fill_with_nan(memory)
            want = reference(shards, weights[rank], form.outer, call)
            check(run_op(shards[rank], weights[rank], form.outer, call), want, f"{inner} rows, {call}")
            if index % 4 == 0:
                for other in (replace(call, fabric=Fabric.LIBRARY), replace(call, max_tokens=len(want[1]) - 1)):
                    check(run_op(shards[rank], weights[rank], form.outer, other), want, f"library: {inner}, {call}")
            count += 1
    return count


@pytest.mark.parametrize("world", WORLDS)
def test_equals_the_reference(world: int) -> None:
    assert run_ranks(run_grid, world, world, timeout_s=240) == [len(FORMS) * len(DTYPES) * len(INNERS) * 2] * world


def run_groups(rank: int) -> None:
    """Two sub-groups at once, then their ranks across; special values are sent as the bits that they are."""
    for ranks_of in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        groups = [dist.new_group(ranks) for ranks in ranks_of]
        at = next(index for index, ranks in enumerate(ranks_of) if rank in ranks)
        name, own = groups[at].group_name, ranks_of[at].index(rank)
        reserve(2, name)
        for seed in range(20):
            form = replace(FORMS[seed % len(FORMS)], returns_rows=True)
            call = make_call(form, 64, "bfloat16", 2, name)
            shards, weights = make_inputs(form, 5, 64, "bfloat16", 2, seed=10 * at + seed)
            want = reference(shards, weights[own], form.outer, call)
            check(run_op(shards[own], weights[own], form.outer, call), want, f"{ranks_of[at]}, {call}")
            bits = torch.arange(128, dtype=torch.int16).view(2, 64) * 509
            bare = weights[own]._replace(addends=[None] * len(form.widths))
            rows = run_op(bits[own : own + 1].view(torch.bfloat16), bare, 1, call)[0]
            assert torch.equal(rows.view(torch.int16), bits)


def test_groups_and_special_values() -> None:
    run_ranks(run_groups, 4)


def step(shard: Tensor, b: Tensor, call: str) -> Tensor:
    rows, first, second = torch.ops.weave.all_gather_gemm(shard * 2, [b.t(), b], [None, None], 1, call)
    return first + second + rows  # type: ignore[no-any-return]


def run_compiled(rank: int, world: int) -> None:
    """Under Inductor with a symbolic number of rows, and threads."""
    assert torch.get_num_threads() == 3
    reserve(world)
    call = make_call(Form(returns_rows=True), 64, "float32", world).encode()
    compiled = torch.compile(step, dynamic=True, fullgraph=True)
    for rows in (2, 5, 33, MAX_TOKENS // 2 + 1):
        own = torch.Generator().manual_seed(rank)
        shard, b = torch.randn(rows, 64, generator=own), torch.randn(64, 64, generator=own)
        with torch.no_grad():
            got = compiled(shard, b, call)
        want = step(shard, b.requires_grad_(), call)
        assert_close(got, want.detach(), KERNEL, f"{rows} rows")


def test_compiles_with_symbolic_rows() -> None:
    run_ranks(run_compiled, 2, 2, threads=3)


def run_opcheck(rank: int) -> None:
    reserve(1)
    for form in FORMS:
        [shard], [weights] = make_inputs(form, 6, 64, "bfloat16", 1, seed=1)
        args = (shard, *map(list, weights), form.outer, make_call(form, 64, "bfloat16", 1).encode())
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(torch.ops.weave.all_gather_gemm.default, args, test_utils=checks)


def test_opcheck() -> None:
    run_ranks(run_opcheck, 1)


def test_fake_results_have_the_shapes_of_the_reference() -> None:
    for form in FORMS:
        call = make_call(form, 64, "bfloat16", 2)
        shards, weights = make_inputs(form, 6, 64, "bfloat16", 2, seed=1)
        want = reference(shards, weights[0], form.outer, call)
        with FakeTensorMode(allow_non_fake_inputs=True):
            got = run_op(shards[0], weights[0], form.outer, call)
        assert [(each.shape, each.dtype) for each in got] == [(each.shape, each.dtype) for each in want]


def run_wrong_calls(rank: int) -> None:
    reserve(2)
    call = make_call(Form(), 64, "bfloat16", 2)
    shards, weights = make_inputs(Form(), 7, 64, "bfloat16", 2, seed=1)
    for wrong, outer, found in (
        (shards[0], 2, "7 rows of a rank are not 2 blocks"),
        (shards[0][:, :40], 1, r"\(7, 40\)"),
        (shards[0].float(), 1, "float32"),
    ):
        with pytest.raises(WeaveError, match=found):
            run_op(wrong, weights[0], outer, call)
    check(run_op(shards[rank], weights[rank], 1, call), reference(shards, weights[rank], 1, call), "after errors")
    with pytest.raises(AgreementError, match=rf"with {14 - 2 * rank} tokens, but rank {1 - rank} runs .* with"):
        run_op(shards[rank][: 7 - rank], weights[rank], 1, call)


def test_wrong_calls_are_refused() -> None:
    run_ranks(run_wrong_calls, 2)


def test_call_survives_its_encoding() -> None:
    call = make_call(FORMS[1], 64, "bfloat16", 3)
    assert decode(AllGatherGemmCall, call.encode()) == call
    with pytest.raises(WeaveError, match="not an encoded"):
        decode(AllGatherGemmCall, "{}")
