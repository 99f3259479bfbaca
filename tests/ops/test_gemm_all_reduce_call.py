"""`weave::gemm_all_reduce_norm` on spawned ranks: against its reference, and against the op that takes a GEMM whole.

Uninitialized memory is filled with NaN throughout: a row that was never written shows.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import weaveopt.ops  # noqa: F401
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt.errors import WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.ops.gemm_comm.all_reduce import peer
from weaveopt.ops.gemm_comm.all_reduce.call import GemmReductionCall, decode, num_chunks
from weaveopt.ops.gemm_comm.all_reduce.op import NAME
from weaveopt.ops.gemm_comm.all_reduce.reference import reference
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

Tensor = torch.Tensor
LLAMA = NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True)
LAYER = NormSpec(NormKind.LAYER, 1e-5)
DEPTH, HIDDEN, CHUNK = 24, 64, 5
TOKENS = (0, 1, 5, 6, 13, 40)


@dataclass(frozen=True)
class Form:
    """Properties of a case beyond the sum."""

    layout: str = "nk"
    norm: NormSpec | None = LLAMA
    post: NormSpec | None = None
    residual: bool = True
    reduced_bias: bool = False
    scale: float = 1.0
    wide_out: bool = False
    sum_out: SumOut = SumOut.WHOLE
    three_dims: bool = False
    strided: bool = False


FORMS = (
    Form(),
    Form(layout="kn", norm=LAYER, reduced_bias=True, scale=0.5),
    Form(residual=False, wide_out=True),
    Form(layout="kn", post=LAYER, norm=None),
    Form(sum_out=SumOut.NONE, strided=True),
    Form(three_dims=True, post=LLAMA),
)


def make_call(form: Form, dtype: str, world: int, one_shot: bool = True, chunk: int = CHUNK) -> GemmReductionCall:
    return GemmReductionCall(
        ReductionCall(
            site=f"{form}", group="0", fabric=Fabric.SHM, world=world, hidden=HIDDEN, dtype=dtype,
            out_dtype="float32" if form.wide_out else dtype, max_tokens=chunk,
            one_shot_max_tokens=chunk if one_shot else 0, post=form.post, norm=form.norm, timeout_s=30.0,
            scale=form.scale, sum_out=form.sum_out,
        ),
        "chunks",
    )  # fmt: skip


def make_inputs(
    form: Form, tokens: int, dtype: torch.dtype, world: int, whole: bool = False
) -> tuple[list[tuple[Tensor, Tensor]], EpilogueOperands]:
    """Every rank's input and weight, and what all share; `whole`: of small whole numbers, whose sums are exact."""
    random = torch.Generator().manual_seed(tokens)

    def tensor(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=random)
        return (numbers.mul(2).round() if whole else numbers).to(dtype)

    factors = []
    for _ in range(world):
        a, b = tensor(tokens, DEPTH), tensor(HIDDEN, DEPTH) / (1 if whole else DEPTH**0.5)
        factors.append((a.t().contiguous().t() if form.strided else a, b if form.layout == "nk" else b.t()))
    residual = tensor(tokens, HIDDEN) if form.residual else None
    if residual is not None and form.three_dims:
        residual = residual.view(1, tokens, HIDDEN)
    rest = EpilogueOperands(
        reduced_bias=tensor(HIDDEN) if form.reduced_bias else None,
        residual=residual,
        post_weight=None if form.post is None else tensor(HIDDEN),
        weight=None if form.norm is None else tensor(HIDDEN),
    )
    return factors, rest


def run_op(
    factors: tuple[Tensor, Tensor], form: Form, rest: EpilogueOperands, call: GemmReductionCall
) -> tuple[Tensor, Tensor]:
    normalized, total = torch.ops.weave.gemm_all_reduce_norm(*factors, form.layout, *rest[:7], call.encode())
    return normalized, total


def reserve(world: int, tokens: int = max(TOKENS)) -> None:
    widest = make_call(Form(wide_out=True), "float32", world, chunk=tokens).reduction
    shm.reserve(topology.discover("0", 30.0), memory_plan("0", [widest]), 0, 30.0)


def _check_grid(rank: int, world: int) -> None:
    torch.use_deterministic_algorithms(True)  # new tensors start as NaN
    reserve(world)
    for form, dtype, tokens in itertools.product(some(FORMS), (torch.bfloat16, torch.float32), TOKENS):
        name = str(dtype).removeprefix("torch.")
        factors, rest = make_inputs(form, tokens, dtype, world)
        for one_shot in (True, False):
            call = make_call(form, name, world, one_shot)
            got = run_op(factors[rank], form, rest, call)
            what = f"{tokens} tokens in {num_chunks(call, tokens)} chunks, {call}"
            for result, expected in zip(some(got), reference(factors, form.layout, rest, call), strict=True):
                assert result.is_contiguous()
                assert_close(result, expected, KERNEL, what, dtype)
                everyone = [torch.empty_like(result) for _ in range(world)]
                dist.all_gather(everyone, result)
                assert all(torch.equal(result, other) for other in everyone), f"ranks differ: {what}"


@pytest.mark.parametrize("world", [2, 3])
def test_equals_the_reference(world: int) -> None:
    run_ranks(_check_grid, world, world, timeout_s=240)


def _check_against_whole(rank: int, world: int) -> None:
    """Compares on integers, since a library's GEMM of fewer rows may sum in another order."""
    reserve(world)
    for form, tokens in itertools.product(some(FORMS), TOKENS):
        factors, rest = make_inputs(form, tokens, torch.float32, world, whole=True)
        call = make_call(form, "float32", world)
        got = run_op(factors[rank], form, rest, call)
        a, b = factors[rank]
        whole = replace(call.reduction, max_tokens=max(TOKENS), one_shot_max_tokens=0)
        want = torch.ops.weave.mm_all_reduce_norm(
            a, b.t() if form.layout == "nk" else b, None, *rest[:7], whole.encode()
        )
        for result, expected in zip(some(got), want, strict=True):
            assert torch.equal(result, expected), f"{tokens} tokens, {form}"


def test_equals_the_op_that_takes_the_gemm_whole() -> None:
    run_ranks(_check_against_whole, 2, 2, timeout_s=120)


def _check_library(rank: int, world: int) -> None:
    """Fabric `library`, and ranks that hold other residuals."""
    form = Form()
    factors, rest = make_inputs(form, 13, torch.float32, world)
    call = make_call(form, "float32", world)
    call = replace(call, reduction=replace(call.reduction, fabric=Fabric.LIBRARY))
    for result, expected in zip(
        run_op(factors[rank], form, rest, call), reference(factors, form.layout, rest, call), strict=True
    ):
        assert_close(result, expected, LIBRARY, "library")
    reserve(world)
    assert rest.residual is not None
    own = rest._replace(residual=rest.residual.clone())
    assert own.residual is not None
    own.residual[-1] += rank  # in the last chunk alone
    call = make_call(form, "float32", world)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = run_op(factors[rank], form, own, call)
    assert any("residual" in str(each.message) for each in said), "nobody said that residuals differ"
    for result, expected in zip(got, reference(factors, form.layout, own, call), strict=True):
        assert_close(result, expected, LIBRARY, "other residuals")


def test_the_library_runs_where_ranks_may_not_share_rows() -> None:
    run_ranks(_check_library, 2, 2, timeout_s=120)


def test_calls_are_encoded() -> None:
    for form in FORMS:
        call = make_call(form, "bfloat16", 2)
        assert decode(call.encode()) == call


@pytest.mark.parametrize(
    "change",
    [{"residual_sharded": True}, {"sum_out": SumOut.SHARDED}, {"max_tokens": 0, "one_shot_max_tokens": 0}],
)
def test_what_no_chunk_can_do_is_an_error(change: dict[str, object]) -> None:
    call = make_call(Form(), "float32", 2)
    wrong = replace(call, reduction=replace(call.reduction, **change))  # type: ignore[arg-type]
    with pytest.raises(WeaveError, match="site "):
        decode(wrong.encode())


def test_an_operand_of_another_shape_is_an_error() -> None:
    call = make_call(Form(), "float32", 2)
    with pytest.raises(WeaveError, match=r"stored as kn"):
        run_op((torch.zeros(3, DEPTH), torch.zeros(HIDDEN, DEPTH)), Form(layout="kn"), EpilogueOperands(), call)


def test_a_variant_that_no_gpu_has_is_an_error() -> None:
    call = replace(make_call(Form(), "float32", 2), variant="spiral")
    with pytest.raises(WeaveError, match="no variant 'spiral'"):
        peer.bind(call, call.encode(), NAME, lambda: None)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fake_results_are_as_real_ones(form: Form) -> None:
    factors, rest = make_inputs(form, 13, torch.float32, 1)
    call = make_call(form, "float32", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = run_op(factors[0], form, rest, call)
    for result, expected in zip(some(got), reference(factors, form.layout, rest, call), strict=True):
        assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
