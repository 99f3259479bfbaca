"""The Triton kernels of `moe_experts` compiled for Hopper, on a host without a GPU: `python -m` this file.

Prints a line of JSON for each kernel of each case.
"""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import torch

from tests.emulation.triton_compiler import Compiled, only_compile
from tests.graphs.experts_cases import in_ranges
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.activation import ActivationName
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.plan import plan
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape

SILU = ExpertsCall(ActivationName.SILU, gated=True)
GPT_OSS = ExpertsCall(ActivationName.CLAMPED_SWISH, gated=True, interleaved=True, alpha=1.702, limit=7.0)
CASES = {
    "decode": (ExpertsShape(8, 8, 64, 2048, 768), SILU),
    "decode of transposed weights": (ExpertsShape(8, 4, 64, 2880, 2880), GPT_OSS),
    "batch": (ExpertsShape(512, 8, 64, 2048, 768), SILU),
    "prefill": (ExpertsShape(8192, 8, 64, 2048, 768), SILU),
}


def operands_of(shape: ExpertsShape, call: ExpertsCall) -> ExpertOperands:
    """Without memory: the compiler looks at dtypes and strides."""
    rows, turned = shape.inner * (2 if call.gated else 1), call.interleaved

    def weight(rows: int, columns: int) -> torch.Tensor:
        if turned:
            return empty(shape.experts, columns, rows).transpose(1, 2)
        return empty(shape.experts, rows, columns)

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    choices = (shape.tokens, shape.choices)
    return ExpertOperands(
        empty(shape.tokens, shape.hidden), empty(*choices, dtype=torch.int64), empty(*choices),
        weight(rows, shape.hidden), empty(shape.experts, rows) if turned else None,
        weight(shape.hidden, shape.inner), empty(shape.experts, shape.hidden) if turned else None,
    )  # fmt: skip


def main() -> None:
    from weaveopt.ops.experts import kernels, routing_kernels

    made: list[Compiled] = []
    of_kernels = {each: getattr(kernels, each) for each in ("gate_up", "down", "combine")}
    of_kernels["route"] = routing_kernels.route
    only_compile(of_kernels, made.append)
    with mock.patch.object(gpu, "may_launch_early", lambda _: True):
        for name, (shape, call) in CASES.items():
            gpu.launch(operands_of(shape, call), call, plan(shape, 132, call.gated))
            for kernel in made:
                print(json.dumps({"case": name, **kernel.record()}), flush=True)
            made.clear()
        for name, (shape, call) in CASES.items():
            to_ranks(shape, call)
            print(json.dumps({"case": f"{name}, to ranks", **made.pop().record()}), flush=True)
        for name, (shape, call) in CASES.items():
            gpu.launch(in_ranges(operands_of(shape, call), (3, 29, 32)), call, plan(shape, 132, call.gated))
            for kernel in made:
                print(json.dumps({"case": f"{name}, ranges", **kernel.record()}), flush=True)
            made.clear()


def to_ranks(shape: ExpertsShape, call: ExpertsCall) -> None:
    """The second GEMM, with rows into the memory of several ranks."""
    how = replace(plan(shape, 132, call.gated), splits=1)
    inner = torch.empty(shape.rows, shape.inner, dtype=torch.bfloat16, device="meta")
    order = torch.empty(shape.rows, dtype=torch.int32, device="meta")
    table = torch.empty(how.table_rows(shape), 4, dtype=torch.int32, device="meta")
    buffers = torch.empty(4, dtype=torch.int64, device="meta")
    weights = operands_of(shape, call).of_experts
    gpu.second_gemm(inner, order, table, weights, buffers, shape, how, shape.rows // 4)


if __name__ == "__main__":
    main()
