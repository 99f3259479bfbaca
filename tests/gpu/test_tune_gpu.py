"""Local kernels timed on GPUs: from CUDA graphs, at their shapes, alike on all ranks, and from disk the second time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.launch import needs_cuda_part, run_ranks
from tests.graphs.nonempty import some
from weaveopt.autotune.asked_kernels import AskedKernel
from weaveopt.autotune.device_class import device_class
from weaveopt.autotune.kernel_calls import Operands, launch_of
from weaveopt.autotune.kernel_timing import time_kernels
from weaveopt.cost_model import Attention
from weaveopt.cost_model.attention import shape_of
from weaveopt.cost_model.timed import KernelShape

BF16 = "bfloat16"
CAUSAL = Attention(1, 16, 4, 1500, 1500, 128, BF16, causal=True)
KERNELS = {
    "linear": KernelShape("gemm", BF16, 1500, (5120, 3456), "rc"),
    "linear with bias": KernelShape("gemm", BF16, 1500, (5120, 3456), "rc addmm"),
    "gradient of a weight": KernelShape("gemm", BF16, 5120, (1500, 3456), "cr"),
    "batched": KernelShape("bmm", BF16, 700, (16, 128, 640), "rr"),
    "sdpa causal": shape_of(CAUSAL),
    "sdpa masked": shape_of(replace(CAUSAL, causal=False, mask_bytes=2 * 1500 * 1500)),
    "flash": shape_of(replace(CAUSAL, kernel="flash")),
    "cudnn": shape_of(replace(CAUSAL, kernel="cudnn")),
    "decode": shape_of(Attention(8, 16, 16, 1, 1500, 128, BF16, mask_bytes=2 * 8 * 1500)),
}


@needs_cuda_part
@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_timed_from_a_cuda_graph(name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = AskedKernel(KERNELS[name], 50.0)
    first, second = (time_kernels([kernel], device, 10.0, 1 << 30) for _ in range(2))
    assert not first.failed and not first.left, first
    (one,), (two,) = first.times, second.times
    assert 1.0 < one.us < 1e4 and 0.7 < one.us / two.us < 1.4, (one, two)


@needs_cuda_part
@pytest.mark.gpu
def test_more_rows_take_longer() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = [AskedKernel(KernelShape("gemm", BF16, size, (5120, 5120), "rc"), 100.0) for size in (512, 2048, 8192)]
    times = [each.us for each in time_kernels(rows, device, 10.0, 1 << 30).times]
    assert len(times) == 3 and times == sorted(times) and times[2] > 2.0 * times[1] > 2.0 * times[0]


@needs_cuda_part
@pytest.mark.gpu
def test_grouped_gemms_are_called_at_their_shape() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launch = launch_of(KernelShape("grouped_gemm", BF16, 512, (16, 2048, 1536), "rc"), Operands(device, 1 << 28))
    assert launch is not None
    made = launch(0)
    assert isinstance(made, torch.Tensor) and made.shape == (512, 1536) and bool(made.isfinite().all())


@needs_cuda_part
@pytest.mark.gpu
def test_a_gpu_is_told_by_what_its_times_depend_on() -> None:
    found = device_class("cuda", 2)
    assert all(found[name] for name in some(("gpu", "driver", "cuda", "power_limit_mw", "most_mhz"))), found


@needs_cuda_part
@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_time_alike_and_once(world: int, tmp_path: Path) -> None:
    printed = run_ranks(world, "tests.gpu.tune_ranks", str(tmp_path))
    assert printed.count("kernels are timed alike") == world
