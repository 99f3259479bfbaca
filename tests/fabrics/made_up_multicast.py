"""GPUs that map each other's memory by NVLink multicast, made up on CPU ranks: torch's handle, and the first calls.

The variable that switches multicast off stays set in the process itself: the module that reads it sees other ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.fabrics.test_arena_gpu import Fill, MadeUpGroup, make_up_gpus
from weaveopt.fabrics import multicast, peer, symmetric, topology
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.multicast import Run
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.topology import Group

OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
POINTER = 0x7F00_0000
FIRST_BYTES = 4096
"""Arena bytes of the first calls."""


class MappedGroup(MadeUpGroup):
    """Stands for the native group of an arena that may be mapped by multicast."""

    def __init__(
        self, bases: list[int], multicast: int, rank: int, device: int, num_bytes: int, fills: list[Fill]
    ) -> None:
        super().__init__(bases, 0, rank, device, num_bytes, fills)
        self.multicast = multicast


@dataclass
class MadeUpTorch:
    """Torch's symmetric memory on this rank, and what was asked of it."""

    pointer: int = POINTER
    """Multicast address of its handles; 0: it made no mapping."""
    supported: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    disabled: list[bool] = field(default_factory=list)
    """For every rendezvous, true if the variable was set."""

    def meet(self, memory: torch.Tensor, process_group: dist.ProcessGroup) -> object:
        off = self.environment.get(OFF) == "1"
        self.disabled.append(off)
        bases = [memory.data_ptr()] * process_group.size()
        return SimpleNamespace(
            rank=process_group.rank(), buffer_ptrs=bases, multicast_ptr=0 if off or not self.supported else self.pointer
        )

    def has_multicast_support(self, device_type: object, index: int) -> bool:
        return self.supported


@dataclass
class MadeUpCalls:
    """Stands for the first calls of an operation on this rank."""

    says: str = ""
    """Error that the first calls report."""
    raises: str = ""
    """The step that raises: `prepare` or `run`."""
    steps: list[str] = field(default_factory=list)

    def layout(self, group: Group) -> Layout:
        return Layout(transient_bytes=FIRST_BYTES)

    def prepare(self, arena: PeerArena) -> Run:
        assert arena.multicast and arena.native.multicast == POINTER  # type: ignore[attr-defined]
        assert arena.num_bytes >= FIRST_BYTES
        return self._step("prepare") or (lambda: self._step("run") or self.says)

    def _step(self, name: str) -> str:
        self.steps.append(name)
        if self.raises == name:
            raise RuntimeError(f"cannot {name}\nand how it came")
        return ""


def make_up(rank: int, made: MadeUpTorch, calls: MadeUpCalls | None = None) -> None:
    """In this rank's process; `calls` None: those that the operations registered."""
    exchange = peer._exchange
    make_up_gpus(rank)
    values: list[tuple[object, str, object]] = [
        (peer, "_exchange", exchange),
        (peer._native, "PeerGroup", MappedGroup),
        (symmetric, "_join", made.meet),
        (symmetric, "os", SimpleNamespace(environ=made.environment)),
        (torch._C._distributed_c10d, "_SymmetricMemory", made),
    ]
    if calls is not None:
        values.append((multicast, "_first_calls", [calls]))
    for module, name, value in values:
        setattr(module, name, value)


def new_group(world: int = 2) -> str:
    """The name of a group that nothing is known of."""
    name: str = dist.new_group([*range(world)]).group_name
    assert topology.discover(name, 30.0).device == "cuda"
    return name
