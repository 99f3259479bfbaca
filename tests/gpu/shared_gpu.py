"""Runs a program of ranks on fewer GPUs than it has ranks: `torchrun ... -m tests.gpu.shared_gpu PROGRAM ARGUMENTS`.

Ranks of one GPU take turns, a time slice each, so every wait for a peer costs milliseconds: results are right or wrong
as on GPUs of their own, times mean nothing. NCCL takes no two ranks of one GPU, so Gloo serves in its place, which no
CUDA graph can hold.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weaveopt.fabrics import peer

SHARED = "WEAVE_TEST_SHARED_GPUS"
"""Set to 1, tests of more ranks than there are GPUs run, through this module."""


def share_gpus() -> None:
    """From here on every device index is taken modulo the number of GPUs, and Gloo stands in for NCCL."""
    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("no CUDA device found")
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % count)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    set_device, init = torch.cuda.set_device, dist.init_process_group
    announcement = peer._announcement

    def set_shared_device(device: torch.device | str | int | None) -> None:
        index = device if isinstance(device, int) else torch.device(device or "cuda:0").index
        set_device((index or 0) % count)

    def init_with_gloo(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        options.pop("device_id", None)
        init("cpu:gloo,cuda:gloo", *arguments, **options)

    def own_announcement(*arguments: Any) -> dict[str, str | int]:
        told = dict(announcement(*arguments))
        return {**told, "device": f"{told['device']}, share of rank {rank}"}

    torch.cuda.set_device = set_shared_device
    dist.init_process_group = init_with_gloo
    replaced: Callable[..., Any] = own_announcement
    peer._announcement = replaced  # type: ignore[assignment]


if __name__ == "__main__":
    share_gpus()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
