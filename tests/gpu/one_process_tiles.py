"""The GEMM alone, and the kernel whose tiles leave while it runs, in a group of one rank, for compute-sanitizer.

`python -m tests.gpu.one_process_tiles` runs them on small GEMMs of every kind and compares with the reference. The
second one takes all of a GPU, so ranks of one process would wait for each other; a rank alone pushes its tiles to
itself and goes through all of the kernel. Device memory comes from the CUDA runtime, as in `one_process`.
"""

from __future__ import annotations

import itertools

import torch

from tests.gpu.one_process import HEADER_BYTES, Gpu
from tests.gpu.op_cases import BULK, GEMMA, Case, make_call, make_inputs, plan_of
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import _native
from weaveopt.fabrics.layout import Layout
from weaveopt.ops.reduction.call import SumOut
from weaveopt.ops.reduction.peer import native_site
from weaveopt.ops.reduction.reference import reference

Tensor = torch.Tensor
CASES = (Case(), Case(norm=GEMMA, wide_weights=True, sum_out=SumOut.NONE), Case(norm=None, sum_out=SumOut.SHARDED))
SHAPES = ((37, 1032, 72), (300, 2048, 136), (150, 8192, 64))
"""Tokens, columns, depth."""
CUTS = ((256, 1, 4), (128, 2, 2), (256, 4, 0))
TILE_COLUMNS = (128, 160, 256)
"""Tile columns of the GEMM alone."""
CALLS = 3
"""Consecutive calls of one site, whose epochs go on."""


def run_case(gpu: Gpu, case: Case, shape: tuple[int, int, int], dtype: str, cut: tuple[int, int, int]) -> int:
    tokens, hidden, k = shape
    kind, owned = getattr(torch, dtype), gpu.num_owned
    # The bulk kernel's buffers of two ranks, which have room for this one's.
    call = make_call(case, hidden, dtype, 2, (BULK.row(2 * tokens + 2),))
    random = torch.Generator().manual_seed(tokens)
    a = torch.randn(tokens, k, generator=random).to(kind)
    weight = (torch.randn(hidden, k, generator=random) / k**0.5).to(kind)
    operands = make_inputs(case, tokens, hidden, kind, 1, seed=tokens, device="cpu").operands
    want = reference([(a.float() @ weight.float().t()).to(kind)], operands, call)
    layout = Layout.of(plan_of([call]))
    num_bytes = HEADER_BYTES + layout.num_bytes
    base, stream = gpu.memory(num_bytes), gpu.stream()
    fills = [(HEADER_BYTES + offset, size, word) for offset, size, word in layout.fills()]
    group = _native.PeerGroup([base], 0, 0, 0, num_bytes, fills)
    site = _native.GpuAllReduceNorm(group, native_site(call, 7, layout))
    vectors = (*operands.vectors, operands.scale)
    fp32 = sum(1 << i for i, x in enumerate(vectors) if x is not None and x.dtype is torch.float32)
    p = [gpu.copy(x) for x in vectors]
    normalized, total = (gpu.poisoned(tokens * hidden * kind.itemsize) for _ in range(2))
    parameters = _native.ReductionParameters(p[0], p[1], p[2], p[3], p[4], p[5], fp32=fp32)
    given = (gpu.copy(a), k, _native.GemmMatrix(gpu.copy(weight), stride=k, k=k), gpu.copy(operands.residual))
    for _ in range(CALLS):
        code = site.run_product(
            tokens, _native.TileConfig(*cut), stream, *given, parameters,
            0 if call.norm is None else normalized, 0 if call.sum_out is SumOut.NONE else total,
        )  # fmt: skip
        assert code == 0, _native.cuda_error_text(code)
    gpu.finish()
    what = f"{shape} {dtype}, cut {cut}, {case}"
    if call.norm is not None:
        assert_close(gpu.read(normalized, want[0]), want[0], KERNEL, f"{what}, normalized", kind)
    if call.sum_out is not SumOut.NONE:
        assert_close(gpu.read(total, want[1]), want[1], KERNEL, f"{what}, sum", kind)
    gpu.free(owned)
    return CALLS


def run_gemm(gpu: Gpu, shape: tuple[int, int, int], dtype: str, tile_columns: int, with_bias: bool) -> int:
    rows, n, k = shape
    kind, owned = getattr(torch, dtype), gpu.num_owned
    random = torch.Generator().manual_seed(rows)
    a = torch.randn(rows, k, generator=random).to(kind)
    weight = (torch.randn(n, k, generator=random) / k**0.5).to(kind)
    bias = torch.randn(n, generator=random).to(kind)
    want = (a.float() @ weight.float().t() + (bias.float() if with_bias else 0.0)).to(kind)
    out, stream = gpu.poisoned(rows * n * kind.itemsize), gpu.stream()
    code = _native.gemm(
        gpu.copy(a), gpu.copy(weight), out, rows, n, k, k, k, n, getattr(_native.DType, dtype), tile_columns, 2, stream,
        gpu.copy(bias) if with_bias else 0,
    )  # fmt: skip
    assert code == 0, _native.cuda_error_text(code)
    gpu.finish()
    what = f"{shape} {dtype}, tiles of {tile_columns} columns, bias {with_bias}"
    assert_close(gpu.read(out, want), want, KERNEL, what, kind)
    gpu.free(owned)
    return 1


def main() -> None:
    gpu, count = Gpu(), 0
    for dtype, shape, columns in itertools.product(("bfloat16", "float16"), SHAPES, TILE_COLUMNS):
        count += run_gemm(gpu, shape, dtype, columns, with_bias=columns != 128)
    for index, (case, shape) in enumerate(itertools.product(CASES, SHAPES)):
        count += run_case(gpu, case, shape, ("bfloat16", "float16")[index % 2], CUTS[index % len(CUTS)])
    print(f"{count} calls agree with the reference")


if __name__ == "__main__":
    main()
