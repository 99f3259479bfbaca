"""What `op_ranks` runs the fused op on: kernels, forms of the computation, inputs, and how a result is checked."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

import torch

import weaveopt.ops  # noqa: F401
from tests.tolerances import KERNEL, LIBRARY, Tolerance, assert_close
from weaveopt.ops.all_reduce_norm.call import AllReduceNormCall, NormForm, NormKind, Quant, SumOut, region_need
from weaveopt.ops.all_reduce_norm.op import reference_quant
from weaveopt.ops.all_reduce_norm.peer import native_form_of
from weaveopt.records.candidate import Algorithm, Fabric, Form, Lowering
from weaveopt.records.memory import RegionNeed

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]

LLAMA = NormForm(NormKind.RMS, 1e-5, cast_before_weight=True)
GEMMA = NormForm(NormKind.RMS, 1e-6, weight_offset=1.0)
LAYER = NormForm(NormKind.LAYER, 1e-5)
INNER = 64
TIMEOUT_S = float(os.environ.get("WEAVE_TIMEOUT_S", 20))  # a checker of memory accesses needs more
DTYPES = ("bfloat16", "float16", "float32")
HIDDENS = (8, 1024, 4096, 5120, 8192, 16384)
MOST_MAIL, MOST_BULK = 1023, 4100
MAIL_TOKENS = (0, 1, 3, 7, 64, 65, 200, MOST_MAIL)
BULK_TOKENS = (1, 3, 65, 200, 1023, MOST_BULK)


@dataclass(frozen=True)
class Kernel:
    """One native kernel, and how far the tests take it."""

    name: str
    algorithm: Algorithm
    form: Form
    tokens: tuple[int, ...]
    num_ctas: int = 0

    @property
    def max_tokens(self) -> int:
        return max(self.tokens)

    def lowering(self, max_tokens: int | None = None) -> Lowering:
        return Lowering(max_tokens or self.max_tokens, self.algorithm, self.form, self.num_ctas)


MAIL_ONE_SHOT = Kernel("mail one-shot", Algorithm.ONE_SHOT, Form.MAIL, MAIL_TOKENS)
MAIL_TWO_SHOT = Kernel("mail two-shot", Algorithm.TWO_SHOT, Form.MAIL, MAIL_TOKENS)
BULK = Kernel("bulk", Algorithm.TWO_SHOT, Form.BULK, BULK_TOKENS)
BULK_FEW = replace(BULK, name="bulk on 5 CTAs", num_ctas=5)
DIRECT = Kernel("direct", Algorithm.TWO_SHOT, Form.DIRECT, BULK_TOKENS)
KERNELS = (MAIL_ONE_SHOT, MAIL_TWO_SHOT, BULK, BULK_FEW, DIRECT)


@dataclass(frozen=True)
class Case:
    """What a call has beyond the sum: the op's optional arguments and the call's options."""

    norm: NormForm | None = LLAMA
    post: NormForm | None = None
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
)


Maybe = Tensor | None


@dataclass(frozen=True)
class Inputs:
    """Every rank's partial result (or the factors of it), and the arguments that all ranks share."""

    partials: list[Tensor]
    factors: list[tuple[Tensor, Tensor]]
    rest: tuple[Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe]
    """reduced_bias, scale, residual, post_weight, post_bias, weight, bias."""
    quant_scale: Tensor | None


def make_inputs(
    case: Case, tokens: int, hidden: int, dtype: torch.dtype, world: int, seed: int, device: str = "cuda"
) -> Inputs:
    """The same on every rank: all GPUs of a host draw alike."""
    random = torch.Generator(device=device).manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
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
        (
            tensor(hidden) if case.reduced_bias else None,
            torch.tensor(0.5, dtype=dtype, device=device) if case.scale_tensor else None,
            residual,
            tensor(hidden, dtype=weight_dtype) if has_post else None,
            tensor(hidden) if has_post and case.biases else None,
            tensor(hidden, dtype=weight_dtype) if has_norm else None,
            tensor(hidden) if has_norm and case.biases else None,
        ),
        torch.tensor(0.02, device=device) if case.quant is Quant.STATIC else None,
    )


def make_call(
    case: Case, hidden: int, dtype: str, world: int, lowerings: tuple[Lowering, ...], group: str = "0"
) -> AllReduceNormCall:
    out_dtype = "float32" if case.wide_out else dtype
    if case.quant is not Quant.NONE:
        out_dtype = "float8_e4m3fn"
    return AllReduceNormCall(
        site=f"{lowerings[0].form.value} {lowerings[0].algorithm.value} {hidden} {dtype} {case}",
        group=group, fabric=Fabric.PEER, world=world, hidden=hidden, dtype=dtype, out_dtype=out_dtype,
        partial_offset=0, output_offset=0, partial_bytes=0, max_tokens=lowerings[-1].max_tokens,
        one_shot_max_tokens=0, post=case.post, norm=case.norm, timeout_s=TIMEOUT_S, scale=case.scale,
        sum_out=case.sum_out, quant=case.quant, lowerings=lowerings,
    )  # fmt: skip


def need_of(calls: list[AllReduceNormCall]) -> RegionNeed:
    needs = [region_need(row, c.hidden, c.dtype, c.out_dtype, c.world) for c in calls for row in c.lowerings]
    return functools.reduce(RegionNeed.union, needs)


def unsupported(kernel: Kernel, case: Case, hidden: int, dtype: str, world: int) -> str:
    from weaveopt import _native

    form = native_form_of(kernel.lowering())
    fp8 = case.quant is not Quant.NONE
    return _native.unsupported(form, getattr(_native.DType, dtype), hidden, world, fp8, torch.cuda.current_device())


def run_op(inputs: Inputs, rank: int, call: AllReduceNormCall, residual: Tensor | None = None) -> Results:
    """The public op that the inputs are for; the third result is empty where there is none."""
    rest = inputs.rest if residual is None else (*inputs.rest[:2], residual, *inputs.rest[3:])
    text = call.encode()
    if call.quant is not Quant.NONE:
        results = torch.ops.weave.all_reduce_norm_quant(inputs.partials[rank], *rest, inputs.quant_scale, text)
        return results[0], results[1], results[2]
    if inputs.factors:
        normed, total = torch.ops.weave.mm_all_reduce_norm(*inputs.factors[rank], None, *rest, text)
    else:
        normed, total = torch.ops.weave.all_reduce_norm(inputs.partials[rank], *rest, text)
    return normed, total, normed.new_empty(0, dtype=torch.float32)


def reference_of(inputs: Inputs, call: AllReduceNormCall, residual: Tensor | None = None) -> Results:
    rest = inputs.rest if residual is None else (*inputs.rest[:2], residual, *inputs.rest[3:])
    return reference_quant(inputs.partials, *rest, inputs.quant_scale, call)


def own_rows(call: AllReduceNormCall, tokens: int, rank: int) -> slice:
    """The rows of the sum that a rank may read: after one-shot all of them hold data, but nobody relies on that."""
    if call.sum_out is not SumOut.SHARDED:
        return slice(0, tokens)
    return slice(*call.share(tokens, rank))


def check(
    got: Results, want: Results, call: AllReduceNormCall, tokens: int, rank: int, what: str, library: bool = False,
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
        assert_close(got[0], want[0], table, f"normed of {what}", activations)
    elif tokens:
        scale = want[2] if quant_scale is None else quant_scale
        check_fp8(got[0], want[0], scale, table[activations], MOST_FP8_DIFFERENCES[call.quant], what)
        if call.quant is Quant.PER_TOKEN:
            assert_close(got[2], want[2], table, f"row_scale of {what}", activations)


FP8_STEP = 0.125
"""One unit in the last place of e4m3: where what is rounded lies between two values, either may come."""
LEAST_FP8_STEP = 2.0**-9
"""The same below e4m3's smallest normal value, where steps are alike."""
MOST_FP8_DIFFERENCES = {Quant.STATIC: 0.03, Quant.PER_TOKEN: 0.15}
"""As a share of all. A row's own scale that is rounded the other way moves many of its values."""


def check_fp8(got: Tensor, want: Tensor, scale: Tensor, before: Tolerance, most: float, what: str) -> None:
    """`before`: how far what is quantized may differ."""
    a, b = got.float() * scale, want.float() * scale
    allowed = before.absolute + (before.relative + FP8_STEP) * b.abs() + LEAST_FP8_STEP * scale
    wrong = ((a - b).abs() > allowed).nonzero()
    assert not len(wrong), f"{len(wrong)} e4m3 normed are too far, the first at {wrong[0].tolist()}: {what}"
    differing = (got.float() != want.float()).float().mean().item()
    assert differing <= most or a.numel() < 1000, f"{differing:.1%} of e4m3 normed differ: {what}"


def checksum(call: AllReduceNormCall, results: Results) -> Tensor:
    """Of all bytes that must be alike on all ranks, as one number on the device."""
    parts = []
    for index, result in enumerate(results):
        if index == 1 and call.sum_out is SumOut.SHARDED:
            continue
        words = result.reshape(-1).view(torch.int32).long()
        places = torch.arange(words.numel(), device=words.device).mul_(2654435761).bitwise_and_(0xFFFFFF).add_(1)
        parts.append((words * places).sum())
    return torch.stack(parts).sum()
