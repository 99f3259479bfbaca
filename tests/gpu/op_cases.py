"""Cases of the fused op for `op_ranks`: kernels, forms of the computation, inputs, and the check of a result."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.tolerances import KERNEL, LIBRARY, Tolerance, assert_close
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.peer import native_kernel
from weaveopt.ops.reduction.reference import reference_quant
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import MemoryPlan
from weaveopt.records.norm import NormKind, NormSpec, Quant

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]

LLAMA = NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True)
GEMMA = NormSpec(NormKind.RMS, 1e-6, weight_offset=1.0)
LAYER = NormSpec(NormKind.LAYER, 1e-5)
INNER = 64
TIMEOUT_S = float(os.environ.get("WEAVE_TIMEOUT_S", 20))  # a checker of memory accesses needs more
DTYPES = ("bfloat16", "float16", "float32")
HIDDENS = (8, 1024, 4096, 5120, 8192, 16384)
MOST_LL_PACKET, MOST_BULK = 1023, 4100
LL_PACKET_TOKENS = (0, 1, 3, 7, 64, 65, 200, MOST_LL_PACKET)
BULK_TOKENS = (1, 3, 65, 200, 1023, MOST_BULK)


@dataclass(frozen=True)
class Kernel:
    """One native kernel, and how far the tests take it."""

    name: str
    algorithm: Algorithm
    transfer: Transfer
    tokens: tuple[int, ...]
    num_ctas: int = 0

    @property
    def max_tokens(self) -> int:
        return max(self.tokens)

    def row(self, max_tokens: int | None = None) -> KernelRow:
        return KernelRow(max_tokens or self.max_tokens, self.algorithm, self.transfer, self.num_ctas)


LL_PACKET_ONE_SHOT = Kernel("LL packets, one-shot", Algorithm.ONE_SHOT, Transfer.LL_PACKET, LL_PACKET_TOKENS)
LL_PACKET_TWO_SHOT = Kernel("LL packets, two-shot", Algorithm.TWO_SHOT, Transfer.LL_PACKET, LL_PACKET_TOKENS)
BULK = Kernel("bulk", Algorithm.TWO_SHOT, Transfer.BULK, BULK_TOKENS)
BULK_FEW = replace(BULK, name="bulk on 5 CTAs", num_ctas=5)
DIRECT = Kernel("direct", Algorithm.TWO_SHOT, Transfer.DIRECT, BULK_TOKENS)
POSTED = Kernel("posted", Algorithm.TWO_SHOT, Transfer.POSTED, BULK_TOKENS)
POSTED_FEW = replace(POSTED, name="posted on 5 CTAs", num_ctas=5)
KERNELS = (LL_PACKET_ONE_SHOT, LL_PACKET_TWO_SHOT, BULK, BULK_FEW, DIRECT)
HOST_KERNELS = (LL_PACKET_ONE_SHOT, LL_PACKET_TWO_SHOT, BULK, BULK_FEW, POSTED, POSTED_FEW)
"""Kernels of the fabric `host`."""


@dataclass(frozen=True)
class Case:
    """Properties of a call beyond the sum: the op's optional arguments and the call's options."""

    norm: NormSpec | None = LLAMA
    post: NormSpec | None = None
    residual: bool = True
    reduced_bias: bool = False
    scale: float = 1.0
    scale_tensor: bool = False
    wide_weights: bool = False
    biases: bool = False
    wide_out: bool = False
    sum_out: SumOut = SumOut.WHOLE
    quant: Quant = Quant.NONE
    product: bool = False
    strided: bool = False
    three_dims: bool = False
    markers: bool = False
    """Words of the data, of the sum and of the results equal the one that an LL packet is empty with."""


CASES = (
    Case(),
    Case(norm=GEMMA, wide_weights=True),
    Case(norm=LAYER, biases=True),
    Case(residual=False, wide_out=True),
    Case(reduced_bias=True, scale=0.125),
    Case(scale_tensor=True, scale=3.0, norm=GEMMA),
    Case(post=GEMMA, norm=GEMMA, wide_weights=True),
    Case(post=LAYER, norm=None, biases=True),
    Case(post=LLAMA, norm=LAYER, biases=True, reduced_bias=True, wide_out=True),
    Case(sum_out=SumOut.NONE, strided=True),
    Case(sum_out=SumOut.SHARDED),
    Case(sum_out=SumOut.SHARDED, norm=None),
    Case(product=True, three_dims=True),
    Case(norm=None, strided=True),
    Case(quant=Quant.STATIC),
    Case(quant=Quant.PER_TOKEN, sum_out=SumOut.SHARDED),
    Case(quant=Quant.PER_TOKEN, norm=GEMMA, residual=False),
    Case(markers=True),
    Case(markers=True, norm=None),
    Case(markers=True, norm=GEMMA, wide_out=True, wide_weights=True, sum_out=SumOut.SHARDED),
    Case(markers=True, quant=Quant.STATIC),
    Case(markers=True, quant=Quant.PER_TOKEN, residual=False),
)


@dataclass(frozen=True)
class Inputs:
    """Every rank's partial result (or the factors of it), and the arguments that all ranks share."""

    partials: list[Tensor]
    factors: list[tuple[Tensor, Tensor]]
    operands: EpilogueOperands


def make_inputs(
    case: Case, tokens: int, hidden: int, dtype: torch.dtype, world: int, seed: int, device: str = "cuda"
) -> Inputs:
    """The same on every rank: all GPUs of a host draw the same numbers."""
    random = torch.Generator(device=device).manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if case.markers:
            return with_markers(torch.randn(shape, generator=random, device=device)).to(dtype)
        if case.strided and len(shape) == 2:
            return torch.randn(shape[::-1], generator=random, device=device).to(dtype).t()
        return torch.randn(shape, generator=random, device=device).to(dtype)

    weight_dtype = torch.float32 if case.wide_weights else dtype
    factors = []
    if case.product:
        factors = [(tensor(tokens, INNER), tensor(INNER, hidden) / INNER**0.5) for _ in range(world)]
    partials = [a @ b for a, b in factors] if case.product else [tensor(tokens, hidden) for _ in range(world)]
    residual = tensor(tokens, hidden) if case.residual else None
    if residual is not None and case.three_dims:
        residual = residual.reshape(1, tokens, hidden)
    has_post, has_norm = case.post is not None, case.norm is not None
    return Inputs(
        partials,
        factors,
        EpilogueOperands(
            tensor(hidden) if case.reduced_bias else None,
            torch.tensor(0.5, dtype=dtype, device=device) if case.scale_tensor else None,
            residual,
            tensor(hidden, dtype=weight_dtype) if has_post else None,
            tensor(hidden) if has_post and case.biases else None,
            tensor(hidden, dtype=weight_dtype) if has_norm else None,
            tensor(hidden) if has_norm and case.biases else None,
            torch.tensor(0.02, device=device) if case.quant is Quant.STATIC else None,
        ),
    )


MARKER_BLOCK = 16
"""Elements in a row that are all zero, or none of them."""


def with_markers(x: Tensor) -> Tensor:
    """Three of four blocks of every row are +0, +0, +0, -0 and so on, in the row's second half; +0 in the first.

    So pairs of 2-byte elements, fp32 and four e4m3 elements hold the bits 0x80000000. So do rows of +0 times a vector,
    whose fourth elements are negative in the first half, and rows of -0 times its second half.
    """
    column = torch.arange(x.shape[-1], device=x.device)
    last, second = column % 4 == 3, column >= x.shape[-1] // 2
    if x.ndim == 1:
        return torch.where(last & ~second, -x.abs(), x.abs())
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    zeros = torch.where(last & second, -0.0, 0.0).expand_as(x)
    return torch.where((rows + column // MARKER_BLOCK) % 4 != 0, zeros, x)


def make_call(
    case: Case, hidden: int, dtype: str, world: int, table: tuple[KernelRow, ...], group: str = "0"
) -> ReductionCall:
    out_dtype = "float32" if case.wide_out else dtype
    if case.quant is not Quant.NONE:
        out_dtype = "float8_e4m3fn"
    return ReductionCall(
        site=f"{table[0].variant} {hidden} {dtype} {case}",
        group=group, fabric=Fabric.PEER, world=world, hidden=hidden, dtype=dtype, out_dtype=out_dtype,
        max_tokens=table[-1].max_tokens, post=case.post, norm=case.norm, timeout_s=TIMEOUT_S, scale=case.scale,
        sum_out=case.sum_out, quant=case.quant, table=table,
    )  # fmt: skip


def plan_of(calls: list[ReductionCall]) -> MemoryPlan:
    return memory_plan(calls[0].group, calls)


def unsupported(kernel: Kernel, case: Case, hidden: int, dtype: str, world: int) -> str:
    from weaveopt import _native

    native = native_kernel(kernel.row())
    fp8 = case.quant is not Quant.NONE
    return _native.unsupported(native, getattr(_native.DType, dtype), hidden, world, fp8, torch.cuda.current_device())


def run_op(inputs: Inputs, rank: int, call: ReductionCall, residual: Tensor | None = None) -> Results:
    """The public op that the inputs are for; the third result is empty where there is none."""
    operands = inputs.operands if residual is None else inputs.operands._replace(residual=residual)
    text = call.encode()
    if call.quant is not Quant.NONE:
        results = torch.ops.weave.all_reduce_norm_quant(inputs.partials[rank], *operands[:8], text)
        return results[0], results[1], results[2]
    rest = operands[:7]  # without what quantization reads
    if inputs.factors:
        normalized, total = torch.ops.weave.mm_all_reduce_norm(*inputs.factors[rank], None, *rest, text)
    else:
        normalized, total = torch.ops.weave.all_reduce_norm(inputs.partials[rank], *rest, text)
    return normalized, total, normalized.new_empty(0, dtype=torch.float32)


def reference_of(inputs: Inputs, call: ReductionCall, residual: Tensor | None = None) -> Results:
    operands = inputs.operands if residual is None else inputs.operands._replace(residual=residual)
    return reference_quant(inputs.partials, operands, call)


def own_rows(call: ReductionCall, tokens: int, rank: int) -> slice:
    """The rows of the sum that a rank may read: after one-shot all of them hold data, but no reader relies on that."""
    if call.sum_out is not SumOut.SHARDED:
        return slice(0, tokens)
    return slice(*call.share(tokens, rank))


def check(
    got: Results, want: Results, call: ReductionCall, tokens: int, rank: int, what: str, library: bool = False,
    quant_scale: Tensor | None = None,
) -> None:  # fmt: skip
    table = LIBRARY if library else KERNEL
    activations = getattr(torch, call.dtype)
    for result, expected in zip(got, want, strict=True):
        assert result.is_contiguous() and result.shape == expected.shape and result.dtype is expected.dtype, what
    if got[1].numel():
        rows = own_rows(call, tokens, rank)
        sums = (got[1].view(tokens, -1)[rows], want[1].view(tokens, -1)[rows])
        assert_close(*sums, table, f"sum of {what}", activations)
    if call.quant is Quant.NONE:
        assert_close(got[0], want[0], table, f"normalized of {what}", activations)
    elif tokens:
        scale = want[2] if quant_scale is None else quant_scale
        check_fp8(got[0], want[0], scale, table[activations], MOST_FP8_DIFFERENCES[call.quant], what)
        if call.quant is Quant.PER_TOKEN:
            assert_close(got[2], want[2], table, f"row_scale of {what}", activations)


FP8_STEP = 0.125
"""One unit in the last place of e4m3: a value between two of e4m3 may be rounded to either."""
LEAST_FP8_STEP = 2.0**-9
"""The same below e4m3's smallest normal value, where steps are equal."""
MOST_FP8_DIFFERENCES = {Quant.STATIC: 0.03, Quant.PER_TOKEN: 0.15}
"""As a share of all. A row's own scale that is rounded the other way moves many of its values."""


def check_fp8(got: Tensor, want: Tensor, scale: Tensor, before: Tolerance, most: float, what: str) -> None:
    """`before`: how far what is quantized may differ."""
    a, b = got.float() * scale, want.float() * scale
    allowed = before.absolute + (before.relative + FP8_STEP) * b.abs() + LEAST_FP8_STEP * scale
    wrong = ((a - b).abs() > allowed).nonzero()
    assert not len(wrong), f"{len(wrong)} e4m3 normalized are too far, the first at {wrong[0].tolist()}: {what}"
    differing = (got.float() != want.float()).float().mean().item()
    assert differing <= most or a.numel() < 1000, f"{differing:.1%} of e4m3 normalized differ: {what}"


def checksum(call: ReductionCall, results: Results) -> Tensor:
    """Checksum of all result bytes that must be equal on all ranks, as one number on the device."""
    parts = []
    for index, result in enumerate(results):
        if index == 1 and call.sum_out is SumOut.SHARDED:
            continue
        words = result.reshape(-1).view(torch.int32).long()
        places = torch.arange(words.numel(), device=words.device).mul_(2654435761).bitwise_and_(0xFFFFFF).add_(1)
        parts.append((words * places).sum())
    return torch.stack(parts).sum()
