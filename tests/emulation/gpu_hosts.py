"""Made-up times between GPUs of several hosts, and the profile that `weaveopt calibrate` would make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weaveopt import cost_model
from weaveopt.cost_model.machine import Machine
from weaveopt.measure.cases.reduction.gpu_hosts import REDUCED_BYTES, GpuHosts, kernels
from weaveopt.measure.clock import Sample
from weaveopt.ops.reduction.variant import Transfer

Times = Callable[[int], float]
"""Microseconds by bytes."""
CPU = torch.device("cpu")


def kernel_us(num_bytes: int) -> float:
    """About what two H100s take that stand for two hosts (benchmarks/results/h100x2/hosts_gpu.json)."""
    return 5.8 + num_bytes / 1.4e5


def flagged_us(num_bytes: int) -> float:
    """Made-up time of flagged rows: the packets' latency and a fence, and half their bytes."""
    return 8.0 + num_bytes / 2.8e5


def library_us(num_bytes: int) -> float:
    """NCCL's all-reduce alone there, and beyond 2 MiB faster than the kernel."""
    return 12.3 + num_bytes / 1e5 if num_bytes <= 2 << 20 else 33.3 + (num_bytes - (2 << 20)) / 4e5


def measured(
    kernel: Times = kernel_us,
    library: Times = library_us,
    hosts: int = 2,
    machines: int = 2,
    flagged: Times | None = None,
    ranks_of_host: int = 1,
) -> GpuHosts:
    """As if between so many hosts of so many GPUs; without `flagged`, before there was more than packets."""
    found = GpuHosts(hosts, ranks_of_host, machines)
    for fused in kernels(quick=False):
        us = kernel if fused.row.transfer is Transfer.PACKET else flagged
        if us is None:
            continue
        rows = found.times.setdefault((hosts * ranks_of_host, fused.hidden, replace(fused.row, max_tokens=0)), [])
        rows.append((fused.bytes, Sample(us(fused.bytes), 0.02)))
    found.reduced = [(size, Sample(library(size), 0.03)) for size in REDUCED_BYTES]
    return found


def machine(
    kernel: Times = kernel_us,
    library: Times = library_us,
    hosts: int = 2,
    base: str = "h100x2",
    flagged: Times | None = None,
    ranks_of_host: int = 1,
) -> Machine:
    """The profile `base` with such times."""
    return measured(kernel, library, hosts, flagged=flagged, ranks_of_host=ranks_of_host).renewed(
        cost_model.load(base), "here", CPU
    )
