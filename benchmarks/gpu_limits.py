"""Bounds of kernels on this GPU: how fast its memory is read, and how fast it multiplies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Limits:
    """About the most that kernels reach."""

    bytes_per_us: float
    """Read from memory."""
    flops_per_us: float
    """GEMMs of bf16 or fp16."""


LIMITS = {
    "H200": Limits(4.1e6, 720e6),
    "H100": Limits(2.86e6, 720e6),  # not measured: an H200's share of the data sheet's 3.35 TB/s
}
"""Limits by a word of the GPU's name."""


def limits(device: torch.device) -> Limits:
    """Raises `SystemExit` where a GPU is not listed: its bounds would be another one's."""
    name = torch.cuda.get_device_name(device)
    for word, found in LIMITS.items():
        if word in name:
            return found
    raise SystemExit(f"found {name}, and bounds of {', '.join(LIMITS)}: add this GPU's to benchmarks/gpu_limits.py")
