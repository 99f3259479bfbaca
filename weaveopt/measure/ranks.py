"""Groups of ranks that measure together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """A group that measures together; `inside` is False on ranks that only wait for it."""

    name: str
    world: int
    rank: int
    inside: bool
    device: torch.device
    process_group: dist.ProcessGroup | None


def subgroup(world: int, device: torch.device) -> Ranks:
    """The first `world` ranks. Every rank of the job calls it."""
    rank, everyone = dist.get_rank(), dist.get_world_size()
    group = dist.distributed_c10d._get_default_group() if world == everyone else dist.new_group(list(range(world)))
    inside = rank < world
    return Ranks(str(group.group_name) if inside else "", world, rank, inside, device, group if inside else None)
