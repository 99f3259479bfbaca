"""Ranks that meet on CPUs and say so: a program for the tests of `tests/gpu/programs.py`."""

from __future__ import annotations

import os
import sys
import time

import torch.distributed as dist


def main() -> None:
    how = sys.argv[1]
    dist.init_process_group("gloo")
    dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} says {sys.argv[2:]}", flush=True)
    if how == "fails" and dist.get_rank() == 1:
        raise ValueError("no more")
    if how != "ends" and dist.get_rank() == 0:
        time.sleep(100)
    os._exit(0)


if __name__ == "__main__":
    main()
