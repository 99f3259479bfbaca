"""The row kernels of every instruction set that this processor runs, alone: a group of one, no other process."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.ops.reduction.call import ReductionCall, SumOut
from weaveopt.ops.reduction.operands import EpilogueOperands
from weaveopt.ops.reduction.reference import reference
from weaveopt.records.candidate import Fabric
from weaveopt.records.norm import NormKind, NormSpec

LLAMA = NormSpec(NormKind.RMS, 1e-5, cast_before_weight=True)
GEMMA = NormSpec(NormKind.RMS, 1e-6, weight_offset=1.0)
LAYER = NormSpec(NormKind.LAYER, 1e-5)
GUARD = 7.0


def native_norm(spec: NormSpec | None) -> _native.NormSpec:
    out = _native.NormSpec()
    if spec is not None:
        out.kind = getattr(_native.NormKind, spec.kind.value)
        out.eps, out.weight_offset, out.cast_before_weight = spec.eps, spec.weight_offset, spec.cast_before_weight
    return out


class Alone:
    """One site in a group of one rank."""

    def __init__(self, isa: str, dtype: str, hidden: int, tokens: int, post: NormSpec | None, norm: NormSpec) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.call = ReductionCall(
            site="rows", group="", fabric=Fabric.LIBRARY, world=1, hidden=hidden, dtype=dtype, out_dtype=dtype,
            max_tokens=tokens, one_shot_max_tokens=tokens,
            post=post, norm=norm, timeout_s=1.0, sum_out=SumOut.WHOLE,
        )  # fmt: skip
        site = _native.AllReduceNormSite()
        site.tag = zlib.crc32(b"rows")
        site.hidden, site.max_tokens, site.one_shot_max_tokens = hidden, tokens, tokens
        site.dtype = site.out_dtype = getattr(_native.DType, dtype)
        layout = _native.Layout()
        layout.partial_bytes = -(-tokens * hidden * 4 // 64) * 64
        layout.partial_offset, layout.output_offset = 0, 2 * layout.partial_bytes
        site.layout = layout
        site.post, site.norm, site.sum_out, site.timeout_s = (
            native_norm(post),
            native_norm(norm),
            _native.SumOut.whole,
            1.0,
        )
        segment = _native.Segment.create(5 * layout.partial_bytes, 1, 0)
        self.native = _native.AllReduceNorm(_native.Group([segment], 0, 1, 0), site, 1, isa)

    def run(self, partial: torch.Tensor, residual: torch.Tensor, parameter: torch.Tensor) -> list[torch.Tensor]:
        """normalized and sum; the memory just after them must stay as it was."""
        results = [torch.full((partial.numel() + 64,), GUARD, dtype=self.dtype) for _ in range(2)]
        fp32 = 0b11111 if parameter.dtype is torch.float32 else 0
        code = self.native.enter_and_run(
            partial.shape[0], 1, partial.data_ptr(), residual.data_ptr(),
            _native.ReductionParameters(*[parameter.data_ptr()] * 5, fp32=fp32),
            results[0].data_ptr(), results[1].data_ptr(), 0.5,
        )  # fmt: skip
        assert code == 0
        assert all((result[partial.numel() :] == GUARD).all() for result in results)
        return [result[: partial.numel()].view(partial.shape) for result in results]


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_equal_the_reference(isa: str, dtype: str) -> None:
    random = torch.Generator().manual_seed(1)
    activations = getattr(torch, dtype)
    for hidden, post, norm in itertools.product((3, 8, 37, 64, 1000), (None, GEMMA, LAYER), (LLAMA, GEMMA, LAYER)):
        alone = Alone(isa, dtype, hidden, 3, post, norm)
        partial, residual = (torch.randn(3, hidden, generator=random).to(activations) for _ in range(2))
        for weights in (activations, torch.float32):
            parameter = torch.randn(hidden, generator=random).to(weights)
            got = alone.run(partial, residual, parameter)
            scale = torch.tensor(0.5)
            given = EpilogueOperands(parameter, scale, residual, parameter, parameter, parameter, parameter)
            want = reference([partial], given, alone.call)
            for name, result, expected in zip(("normalized", "sum"), got, want, strict=True):
                assert_close(result, expected, KERNEL, f"{name}, {isa}, hidden {hidden}, {post}, {norm}")


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversions_are_torchs_own(isa: str, dtype: str) -> None:
    """All 65536 values go through unchanged; sums of two are rounded as torch rounds them, NaN and infinity too."""
    activations = getattr(torch, dtype)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(activations).view(16, 4096)
    alone = Alone(isa, dtype, 4096, 16, None, LLAMA)
    other = every.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(2))].view(16, 4096)
    for addend in (torch.zeros_like(every), other):
        normalized, total = torch.empty_like(every), torch.empty_like(every)
        code = alone.native.enter_and_run(
            16, 1, every.data_ptr(), addend.data_ptr(), _native.ReductionParameters(), normalized.data_ptr(),
            total.data_ptr(), 1.0,
        )  # fmt: skip
        assert code == 0
        want = (every.float() + addend.float()).to(activations)
        assert torch.equal(total.isnan(), want.isnan())
        finite = ~want.isnan()
        assert torch.equal(total[finite].view(torch.int16), want[finite].view(torch.int16))
