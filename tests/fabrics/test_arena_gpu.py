"""How ranks agree on a GPU arena, on CPU ranks: torch's GPU calls and the native group are made up."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import collect, run_ranks
from weaveopt import _native
from weaveopt.errors import AgreementError, ArenaError
from weaveopt.fabrics import peer, shm, topology
from weaveopt.fabrics.layout import Layout
from weaveopt.fabrics.peer import PeerArena
from weaveopt.fabrics.topology import Group
from weaveopt.pipeline.agree import Agreed
from weaveopt.pipeline.bind import bind
from weaveopt.pipeline.plan import Planned
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan
from weaveopt.solver.placement import PlacementRequest, place

EMPTY = 0x80000000
TIMEOUT_S = 20.0
HEADER_BYTES = _native.HEADER_BYTES
Fill = tuple[int, int, int]


class MadeUpGroup:
    def __init__(
        self,
        bases: list[int],
        multicast: int,
        rank: int,
        device: int,
        num_bytes: int,
        fills: list[tuple[int, int, int]],
    ) -> None:
        assert multicast == 0, "no arena is ever mapped for multicast"
        assert all(offset >= HEADER_BYTES and offset + size <= num_bytes for offset, size, _ in fills)
        self.fills = fills
        self.status = SimpleNamespace(code=_native.Code.OK)

    def acknowledge(self) -> None: ...
    def abort(self, code: _native.Code) -> None: ...
    def retire(self) -> None: ...


def make_up_gpus(
    rank: int, device: int | None = None, free_bytes: int = 1 << 40, processors: int = 132, has_code: bool = True
) -> None:
    """Replaces what needs a GPU, in this rank's process."""
    own = rank if device is None else device
    cuda: object = torch.cuda
    made_up = {
        "is_available": lambda: True,
        "current_device": lambda: own,
        "get_device_properties": lambda index: SimpleNamespace(
            uuid=f"GPU-{index}", major=9, minor=0, multi_processor_count=processors
        ),
        "mem_get_info": lambda index: (free_bytes, 1 << 40),
        "synchronize": lambda index=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }
    for name, function in made_up.items():
        setattr(cuda, name, function)
    module: object = peer
    native = SimpleNamespace(
        has_cuda=True, PeerGroup=MadeUpGroup, has_code=lambda device: has_code, CUDA_ARCHS="100+PTX"
    )
    for name, value in {
        "_native": native,
        "_allocate": lambda num_bytes, device: torch.zeros(num_bytes, dtype=torch.uint8),
        "_exchange": lambda memory, group, timeout_s, by_multicast: (object(), [memory.data_ptr()] * len(group.ranks)),
    }.items():
        setattr(module, name, value)


def plan_of(transient_bytes: int = 0, **kept_bytes: int) -> MemoryPlan:
    """Buffers that live as long as the arena, by name, and one that does not."""
    buffers = [
        Buffer(name, size, Lifetime.ARENA, EMPTY if name == "mailboxes" else None) for name, size in kept_bytes.items()
    ]
    if transient_bytes:
        buffers.append(Buffer("partial", transient_bytes))
    return MemoryPlan("0", Fabric.PEER, 0, place([PlacementRequest("site", buffer, 0, 0) for buffer in buffers]))


NEED = plan_of(mailboxes=1024, staging=256, output=1024)


def sizes(arena: PeerArena) -> dict[str, int]:
    return {buffer.name: buffer.num_bytes for buffer in arena.layout.buffers}


def reserve(need: MemoryPlan = NEED, group: str = "0", timeout_s: float = TIMEOUT_S, floor_bytes: int = 0) -> PeerArena:
    return peer.reserve(topology.discover(group, timeout_s), need, floor_bytes, timeout_s)


def run_unlike(rank: int) -> None:
    make_up_gpus(rank, processors=132 - 18 * rank)
    with pytest.raises(ArenaError, match=r"GPUs differ .*rank 0: 9.0 with 132 processors; rank 1: 9.0 with 114"):
        reserve()
    make_up_gpus(rank)
    # Torch's ranks look for each other's sockets in their own folder for temporary files.
    os.environ["TMPDIR"] = f"/tmp/of-rank-{rank}"
    with pytest.raises(ArenaError, match=r"differ \(TMPDIR: rank 0: /tmp/of-rank-0; rank 1: /tmp/of-rank-1"):
        reserve()


def test_unlike_gpus_and_folders_are_refused() -> None:
    """A kernel has as many CTAs as its GPU has processors, each paired with one of every peer."""
    run_ranks(run_unlike, 2)


def run_without_code(rank: int) -> None:
    make_up_gpus(rank, has_code=rank == 0)
    said = r"rank 1: weaveopt was built for CUDA architectures 100\+PTX, and cuda:1 is sm_90: .* WEAVE_CUDA_ARCHS=90$"
    with pytest.raises(ArenaError, match=said):
        reserve()


def test_a_gpu_that_the_build_has_no_code_for_is_named_on_all_ranks() -> None:
    run_ranks(run_without_code, 2)


def run_lifetimes(rank: int) -> None:
    known = topology.discover("0", TIMEOUT_S)
    with pytest.raises(ArenaError, match=r"built without CUDA|torch finds no GPU"):
        reserve()
    make_up_gpus(rank)
    with pytest.raises(ArenaError, match="no GPU arena was reserved for group '0'"):
        peer.of("0")
    small = reserve()
    assert reserve() is small is peer.of("0") and reserve(plan_of(output=256)) is small
    assert small.num_bytes == HEADER_BYTES + 1024 + 256 + 1024
    assert [small.buffer(name).offset for name in ("mailboxes", "output", "staging")] == [0, 1024, 2048]
    assert small.native.fills == [(HEADER_BYTES, 1024, EMPTY)]  # type: ignore[attr-defined]
    assert [process.has_ended() for process in small.peers] == [False, False]
    assert small.tensor(256, (2, 3), torch.float32).shape == (2, 3)
    with pytest.raises(ArenaError, match="outside the arena"):
        small.tensor(small.num_bytes - HEADER_BYTES - 4, (2,), torch.float32)

    let_go = []
    small.at_close(lambda: let_go.append("small"))
    torch.cuda.is_current_stream_capturing = lambda: True
    small.begin_call()
    torch.cuda.is_current_stream_capturing = lambda: False
    large = reserve(plan_of(staging=2048, transient_bytes=512))
    assert sizes(large) == {"mailboxes": 1024, "output": 1024, "staging": 2048}, "the larger of old and new"
    assert large.transient_begin == 4096 and large.num_bytes == HEADER_BYTES + 4096 + 512
    assert let_go == ["small"] and not small.closed, "sites bind again; captured graphs keep the old addresses"
    large.begin_call()
    assert small.tensor(0, (1,), torch.uint8).item() == 0 and peer.of("0") is large

    with pytest.raises(ArenaError, match=r"ask for arenas of different buffers: rank 0: .*; rank 1: "):
        reserve(plan_of(output=4096 * (1 + rank)))
    assert reserve() is large, "what was there stays"
    torch.cuda.is_current_stream_capturing = lambda: True
    assert reserve() is large
    with pytest.raises(ArenaError, match="while a CUDA graph is captured"):
        reserve(plan_of(output=1 << 20))
    torch.cuda.is_current_stream_capturing = lambda: False

    group = dist.new_group([0, 1])
    beside = reserve(group=group.group_name)
    assert beside is not large and beside.layout == Layout.of(NEED)
    peer.release("0")
    assert small.closed and large.closed and not beside.closed
    assert dict(vars(known))["device"] == "cpu"
    dist.destroy_process_group(group)
    del group
    again = reserve()
    assert again.layout == Layout.of(NEED)
    spacious = reserve(floor_bytes=1 << 20)
    assert spacious.num_bytes == 1 << 20, "header included"
    assert again.closed and peer.of("0") is spacious, "nothing was captured with it"
    assert all(size > 100 * sizes(again)[name] for name, size in sizes(spacious).items()), "room for what comes"
    assert reserve(plan_of(output=1 << 18), floor_bytes=1 << 19) is spacious
    assert reserve(plan_of(output=1 << 20)).num_bytes > HEADER_BYTES + (1 << 20) and spacious.closed


def run_refusals(rank: int) -> None:
    make_up_gpus(rank, device=3)
    with pytest.raises(ArenaError, match="ranks 0 and 1 both use GPU GPU-3"):
        reserve()
    make_up_gpus(rank, free_bytes=100 if rank == 1 else 1 << 40)
    with pytest.raises(
        ArenaError, match=f"share {HEADER_BYTES + 2304} bytes of GPU memory per rank: rank 1: 100 bytes are free"
    ):
        reserve()

    make_up_gpus(rank)
    working = peer._allocate

    def fails(num_bytes: int, device: int) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("out of memory\nand how it came")
        return working(num_bytes, device)

    module: object = peer
    setattr(module, "_allocate", fails)  # noqa: B010
    with pytest.raises(ArenaError, match=r"rank 1: out of memory$"):
        reserve()
    setattr(module, "_allocate", working)  # noqa: B010

    def unreachable(
        memory: torch.Tensor, group: Group, timeout_s: float, by_multicast: bool
    ) -> tuple[object, list[int]]:
        raise RuntimeError("no peer access")

    before, peer._exchange = peer._exchange, unreachable if rank == 0 else peer._exchange
    with pytest.raises(ArenaError, match=r"rank 0: no peer access$"):
        reserve()
    peer._exchange = before
    with pytest.raises(ArenaError, match=r"ask for arenas of different buffers: rank 0: .*\[256, .*rank 1: .*\[512, "):
        reserve(plan_of(output=256 * (1 + rank)))
    assert reserve().layout == Layout.of(NEED)


def test_an_arena_grows_is_kept_and_is_given_back() -> None:
    run_ranks(run_lifetimes, 2)


def test_what_one_rank_cannot_do_all_ranks_hear_of() -> None:
    run_ranks(run_refusals, 2)


def run_late(rank: int) -> str:
    topology.discover("0", TIMEOUT_S)
    if rank == 1:
        return "never comes"
    make_up_gpus(rank)
    with pytest.raises(AgreementError, match=r"rank 1 of \(0, 1\) did not come within 1 s for a GPU arena"):
        reserve(timeout_s=1.0)
    return "told"


def test_a_rank_that_never_comes_is_an_error() -> None:
    assert [outcome.value for outcome in collect(run_late, 2)] == ["told", "never comes"]


def test_fake_and_spread_groups_have_no_gpu_arena() -> None:
    with pytest.raises(ArenaError, match="without peers"):
        peer.reserve(topology.fake(4, device="cuda"), NEED, 0, 1.0)


def test_layouts_are_compared_buffer_by_buffer() -> None:
    layout = Layout.of(NEED)
    assert layout.holds(Layout()) and layout.holds(layout) and layout.holds(Layout.of(plan_of(output=1024)))
    for more in ({"partial": 1}, {"output": 1025, "staging": 0}, {"transient_bytes": 1 << 20}):
        assert not layout.holds(Layout.of(plan_of(**more)))
        assert layout.union(Layout.of(plan_of(**more))).holds(Layout.of(plan_of(**more)))
    assert not layout.holds(Layout(floor_bytes=1 << 20)) and layout.union(Layout(floor_bytes=1 << 20)).holds(layout)
    one, other = Layout.of(plan_of(staging=512)), Layout.of(plan_of(output=9999, transient_bytes=5))
    assert one.union(other).union(layout) == layout.union(other).union(one), "in whatever order graphs come"


def test_binding_a_plan_reserves_on_its_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = (MemoryPlan("tp", Fabric.SHM, 8192), MemoryPlan("ep", Fabric.PEER, 70000, NEED.buffers))
    known = {name: replace(topology.fake(2), fake=False) for name in ("tp", "ep")}
    context = SimpleNamespace(topologies=known, config=SimpleNamespace(compile_timeout_s=7.0, arena_bytes=9999))
    asked: list[tuple[object, ...]] = []
    for module in (shm, peer):
        monkeypatch.setattr(module, "reserve", lambda *of: asked.append(of))
    assert bind(Agreed(None, Planned(plans, {})), "", context) == ""  # type: ignore[arg-type]
    assert asked == [(known["tp"], plans[0], 9999, 7.0), (known["ep"], plans[1], 9999, 7.0)]
