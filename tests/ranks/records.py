"""Records of a rank's job and of its outcome."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

_VISIBLE = "CUDA_VISIBLE_DEVICES"
GROUP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    rank: int
    value: object = None
    error: str = ""
    """Traceback, or how the process died."""
    spoiled: str = ""
    """Changes that this rank left in its process, which therefore runs nothing else."""


@dataclass(frozen=True)
class Job:
    """One call on all ranks. It has to pickle."""

    fn: Callable[..., object]
    args: tuple[object, ...]
    world: int
    port: int
    threads: int
    grouped: bool
    environment: Mapping[str, str]

    def environment_of(self, rank: int) -> dict[str, str]:
        """All variables of a rank, those of a launcher among them."""
        return {
            **self.environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "RANK": str(rank),
            "WORLD_SIZE": str(self.world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.world),
        }  # fmt: skip

    def run(self, rank: int) -> Outcome:
        """Runs `fn(rank, *args)`; returns its value, or the traceback of its error."""
        try:
            import torch
            import torch.distributed as dist
            import torch.distributed.distributed_c10d as c10d

            torch.set_num_threads(self.threads)
            if self.grouped:
                dist.init_process_group("gloo", rank=rank, world_size=self.world, timeout=GROUP_TIMEOUT)
                # A rank that is through while others still connect would end them.
                store = c10d._get_default_store()
                store.set(f"connected/{rank}", "")
                store.wait([f"connected/{other}" for other in range(self.world)])
            outcome = Outcome(rank, self.fn(rank, *self.args))
            if self.grouped:
                dist.destroy_process_group()
        except BaseException:
            outcome = Outcome(rank, error=traceback.format_exc())
        return outcome


def environment() -> dict[str, str]:
    """This process's variables, for ranks on CPUs: they see no GPU."""
    return {**os.environ, _VISIBLE: ""}


@contextmanager
def no_gpus() -> Iterator[None]:
    """CPU ranks see no GPU, from before torch is loaded: libraries would pick it up where there is one."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE)
        if before is not None:
            os.environ[_VISIBLE] = before
