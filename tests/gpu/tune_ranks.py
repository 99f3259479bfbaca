"""One rank of `test_tune_gpu`: local kernels of a compiled block timed on GPUs, alike on all ranks, and once."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor

import weaveopt
from tests.graphs import forms
from tests.graphs.nonempty import some
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.autotune import tune
from weaveopt.autotune.kernel_calls import GPU_COLD_BYTES, Operands, launch_of
from weaveopt.cost_model.timed import KernelShape
from weaveopt.measure.clock import CudaClock
from weaveopt.records.report import GraphReport, KernelReport

TOKENS, HIDDEN, HEADS, HEAD = 1500, 2560, 10, 128
"""A token count and sizes that no profile was measured at."""
SECOND_US = 200e3
"""Longest time of the step when everything is known, in microseconds."""


def shape_of(kernel: KernelReport) -> KernelShape:
    name, dtype, sizes, *layout = kernel.kernel.split()
    size, *rest = map(int, sizes.split("x"))
    return KernelShape(name, dtype, size, tuple(rest), " ".join(layout))


def compiled_report(folder: str, rank: int) -> GraphReport:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16() / shape[-1] ** 0.5

    qkv, out, norm = random(3 * HEADS * HEAD, HIDDEN), random(HIDDEN, HEADS * HEAD), random(HIDDEN).abs()

    def block(x: Tensor, residual: Tensor) -> Tensor:
        query, key, value = (each.view(1, TOKENS, HEADS, HEAD).transpose(1, 2) for each in (x @ qkv.t()).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        partial = mixed.transpose(1, 2).reshape(TOKENS, HEADS * HEAD) @ out.t()
        total = residual + functional.all_reduce(partial, "sum", dist.group.WORLD)
        return forms.rms(total, norm) @ qkv.t()

    own = torch.Generator("cuda").manual_seed(100 + rank)
    x = torch.randn(TOKENS, HIDDEN, generator=own, device="cuda").bfloat16()
    residual = random(TOKENS, HIDDEN)
    torch._dynamo.reset()
    options = {"tune_budget_s": 5.0, "tune_cache": folder, "strict": True, "timeout_s": 30.0}
    with torch.no_grad():
        made = torch.compile(block, backend="weave", options=options, dynamic=False)  # type: ignore[call-overload]
        assert_close(made(x, residual), block(x, residual), LIBRARY, "the block")
    return weaveopt.report().graphs[-1]


def main() -> None:
    rank, folder = int(os.environ["RANK"]), sys.argv[1]
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    tune.SECONDS_A_GRAPH = 5.0  # the share of so small a graph is gone before its last kernel
    report = compiled_report(folder, rank)
    assert report.kernels, report.tuned
    times = {kernel.kernel: kernel.us for kernel in report.kernels}
    told: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, times)
    assert all(each == times for each in told), "ranks differ"
    gemms = [kernel for kernel in report.kernels if kernel.kernel.startswith("gemm ")]
    clock, operands = CudaClock(), Operands(torch.device("cuda"), GPU_COLD_BYTES)
    for kernel in some(gemms, f"GEMMs among {report.kernels}, {report.tuned}"):
        launch = launch_of(shape_of(kernel), operands)
        assert launch is not None, kernel
        sample = clock.alone(launch, kernel.us)
        assert 0.6 < kernel.us / sample.us < 1.7, (kernel, sample)
    again = compiled_report(folder, rank)
    assert again.tuned.startswith("0 kernels timed in 0.00 s"), again.tuned
    assert {kernel.kernel: kernel.us for kernel in again.kernels} == times
    assert float(dict(again.steps_us)["tune"]) < SECOND_US, again.steps_us
    print(f"rank {rank}: kernels are timed alike; {report.tuned}", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
