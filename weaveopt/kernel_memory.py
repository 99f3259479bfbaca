"""Shared memory that a program of a Triton kernel may have: plans are made for Hopper, other GPUs have less."""

from __future__ import annotations

from functools import cache

import torch

HOPPER_BYTES = 227 * 1024
"""Hopper's, and as much on data-center GPUs after it. An A100 has 163 KiB, an L40S or an RTX card 99."""


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes a program on this device, as Triton itself checks them; Hopper's where kernels are not launched."""
    if device.type != "cuda":
        return HOPPER_BYTES
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
