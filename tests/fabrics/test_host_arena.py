"""The arena in memory of the host, on CPU ranks: segments, limits and faults are real, GPU and driver are made up."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.fabrics.test_arena_gpu import TIMEOUT_S, make_up_gpus
from tests.ranks import collect, run_ranks
from weaveopt import _native
from weaveopt.errors import AgreementError, ArenaError
from weaveopt.fabrics import gpus, host, topology
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.host import HostArena
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan
from weaveopt.solver.placement import PlacementRequest, place

EMPTY = 0x80000000
HEADER_BYTES = _native.HEADER_BYTES
PAGE = host.PAGE_BYTES


class MadeUpHostGroup:
    """The native group, as far as the arena and the watchdog use it. Keeps the segments mapped, as that one does."""

    refused = ""

    def __init__(self, segments: list[_native.Segment], rank: int, device: int) -> None:
        if MadeUpHostGroup.refused:
            raise RuntimeError(MadeUpHostGroup.refused)
        for segment in segments:
            header = torch.frombuffer(segment, dtype=torch.uint8)[:HEADER_BYTES]
            assert not header.any(), "peers may write as soon as all are mapped: headers are cleared before"
        self.segments = tuple(segments)
        self.status = SimpleNamespace(code=_native.Code.OK)

    def acknowledge(self) -> None: ...
    def abort(self, code: _native.Code) -> None: ...
    def retire(self) -> None: ...


def make_up(rank: int, missing: str = "", device: int | None = None, root: str = "") -> None:
    """Replaces what needs a GPU or its driver, in this rank's process. `root`: of the files that limit memory."""
    make_up_gpus(rank, device)

    def create(*values: int, **named: object) -> _native.Segment:
        assert named.get("in_dev_shm") is False
        return _native.Segment.create(*values, root=root, **named)  # type: ignore[arg-type]

    segment = SimpleNamespace(create=create, open=_native.Segment.open)
    native: object = SimpleNamespace(has_cuda=True, Segment=segment, HostGroup=MadeUpHostGroup)
    modules: tuple[tuple[object, str, object], ...] = (
        (host, "_native", native),
        (gpus, "why_no_host_memory", lambda index: missing),
        (gpus, "memory_node", lambda index: 0),
    )
    for module, name, value in modules:
        setattr(module, name, value)
    MadeUpHostGroup.refused = ""


def plan_of(**kept_bytes: int) -> MemoryPlan:
    buffers = [
        Buffer(name, size, Lifetime.ARENA, EMPTY if name == "mailboxes" else None) for name, size in kept_bytes.items()
    ]
    return MemoryPlan("0", Fabric.HOST, 0, place([PlacementRequest("site", buffer, 0, 0) for buffer in buffers]))


NEED = plan_of(mailboxes=1024, staging=256, output=1024)


def reserve(need: MemoryPlan = NEED, timeout_s: float = TIMEOUT_S, floor_bytes: int = 0) -> HostArena:
    found = transport(Fabric.HOST).reserve(topology.discover("0", timeout_s), need, floor_bytes, timeout_s)
    assert isinstance(found, HostArena)
    return found


def mapped() -> int:
    """Segments that this process maps."""
    gc.collect()
    return sum("memfd:weaveopt" in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run_lifetimes(rank: int) -> None:
    with pytest.raises(ArenaError, match=r"built without CUDA|torch finds no GPU"):
        reserve()
    make_up(rank)
    with pytest.raises(ArenaError, match="no arena in memory of the host was reserved for group '0'"):
        host.of("0")
    named, before = set(os.listdir("/dev/shm")), num_descriptors()
    small = reserve()
    assert reserve() is small is host.of("0")
    assert mapped() == 2 and num_descriptors() <= before + 2, "a segment of each rank; a pidfd of each stays open"
    # What a rank writes into its peer's segment, the peer reads in its own.
    words = torch.frombuffer(small.native.segments[1 - rank], dtype=torch.int32)  # type: ignore[attr-defined]
    at = small.buffer("staging").offset
    words[(HEADER_BYTES + at) // 4] = 100 + rank
    dist.barrier()
    assert small.tensor(at, (2,), torch.int32).tolist() == [100 + 1 - rank, 0]
    mailboxes = small.tensor(small.buffer("mailboxes").offset, (256,), torch.int32)
    output = small.tensor(small.buffer("output").offset, (256,), torch.int32)
    assert mailboxes.eq(-(1 << 31)).all() and output.eq(0).all()
    with pytest.raises(ArenaError, match="outside the arena"):
        small.tensor(small.num_bytes - HEADER_BYTES - 4, (2,), torch.float32)
    del mailboxes, output, words

    let_go = []
    small.at_close(lambda: let_go.append("small"))
    torch.cuda.is_current_stream_capturing = lambda: True
    small.begin_call()
    with pytest.raises(ArenaError, match=r"while a CUDA graph is captured: .*weaveopt\.fabrics\.host\.reserve"):
        reserve(plan_of(output=1 << 20))
    torch.cuda.is_current_stream_capturing = lambda: False
    large = reserve(plan_of(staging=2048))
    assert let_go == ["small"] and not small.closed and mapped() == 4, "captured graphs keep the old addresses"
    larger = reserve(plan_of(staging=1 << 16))
    assert large.closed and host.of("0") is larger
    del large
    assert mapped() == 4, "what no graph holds is given back"
    with pytest.raises(ArenaError, match=r"ask for arenas of different buffers: rank 0: .*; rank 1: "):
        reserve(plan_of(output=1 << (18 + rank)))
    assert mapped() == 4, "a failure leaves nothing"
    assert reserve(floor_bytes=1 << 22).num_bytes == 1 << 22, "header included"
    dist.barrier()
    host.release("0")
    assert small.closed and larger.closed
    del small, larger
    assert mapped() == 0 and num_descriptors() <= before and set(os.listdir("/dev/shm")) == named


def run_refusals(rank: int, folder: str) -> None:
    make_up(rank, missing="the driver cannot register memory of the host" if rank == 1 else "")
    with pytest.raises(
        ArenaError, match=r"host memory per rank: rank 1: the driver cannot register memory of the host$"
    ):
        reserve()
    make_up(rank, device=3)
    with pytest.raises(ArenaError, match="ranks 0 and 1 both use GPU GPU-3"):
        reserve()
    make_up(rank, root=folder if rank == 0 else "")
    said = rf"rank 0: cannot reserve \d+ bytes of shared memory on each of 2 ranks: 65536 are available \({folder}"
    with pytest.raises(ArenaError, match=said):
        reserve()
    make_up(rank)
    MadeUpHostGroup.refused = "cannot register 139264 bytes of rank 0: out of memory (ulimit -l allows 65536 bytes)"
    if rank == 0:
        MadeUpHostGroup.refused = ""
    with pytest.raises(ArenaError, match=r"rank 1: cannot register .* \(ulimit -l allows 65536 bytes\)$"):
        reserve()
    MadeUpHostGroup.refused = ""
    unopened = host._open_all

    def hidden(*of: object) -> Sequence[_native.Segment]:
        raise ArenaError("the memory of rank 1: cannot open /proc/7/fd/3: Permission denied")

    module: object = host
    setattr(module, "_open_all", hidden if rank == 0 else unopened)  # noqa: B010
    with pytest.raises(ArenaError, match=r"rank 0: the memory of rank 1: cannot open /proc/7/fd/3: Permission denied$"):
        reserve()
    setattr(module, "_open_all", unopened)  # noqa: B010
    assert mapped() == 0, "no failure leaves a segment mapped"
    assert reserve().num_bytes == HEADER_BYTES + 2304


def run_late(rank: int) -> str:
    topology.discover("0", TIMEOUT_S)
    if rank == 1:
        return "never comes"
    make_up(rank)
    with pytest.raises(AgreementError, match=r"rank 1 of \(0, 1\) did not come within 1 s for an arena of"):
        reserve(timeout_s=1.0)
    assert mapped() == 0
    return "told"


def test_an_arena_is_shared_grows_and_is_given_back() -> None:
    run_ranks(run_lifetimes, 2)


def test_what_one_rank_cannot_do_all_ranks_hear_of(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text(f"{65536}\n")
    (group / "memory.current").write_text("0\n")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text("1 0 0:1 / /group rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    run_ranks(run_refusals, 2, str(tmp_path))


def test_a_rank_that_never_comes_is_an_error() -> None:
    assert [outcome.value for outcome in collect(run_late, 2)] == ["told", "never comes"]


def test_groups_without_peers_have_none() -> None:
    with pytest.raises(ArenaError, match="without peers"):
        host.reserve(topology.fake(4, device="cuda"), NEED, 0, 1.0)


def policies() -> list[str]:
    """Placement of this process's segments, as the system tells it."""
    return [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "memfd:weaveopt" in line]


@pytest.mark.usefixtures("little_garbage")
@pytest.mark.parametrize("node", [-1, 0, 1023, 1024])
def test_a_memory_node_is_a_wish(node: int) -> None:
    """A system that knows no such node, or forbids the choice, makes the segment all the same."""
    segment = _native.Segment.create(1 << 20, 7, 0, in_dev_shm=False, node=node)
    values = torch.frombuffer(segment, dtype=torch.uint8)
    values.fill_(3)
    assert values.numel() == 1 << 20 and mapped() == 1
    if node == 0 and Path("/proc/self/numa_maps").exists() and _may_choose_nodes():
        (line,) = policies()
        assert "prefer" in line, line


def _may_choose_nodes() -> bool:
    import ctypes
    import mmap

    place = mmap.mmap(-1, mmap.PAGESIZE)
    nodes = (ctypes.c_ulong * 16)(1)
    address = ctypes.addressof(ctypes.c_char.from_buffer(place))
    sys_mbind = 237  # x86-64
    library = ctypes.CDLL(None, use_errno=True)
    of_this = os.uname().machine == "x86_64"
    return of_this and library.syscall(sys_mbind, ctypes.c_void_p(address), mmap.PAGESIZE, 1, nodes, 1025, 0) == 0


def test_a_segment_of_memory_alone_takes_nothing_of_dev_shm() -> None:
    before = os.statvfs("/dev/shm").f_bfree
    segment = _native.Segment.create(64 << 20, 7, 0, in_dev_shm=False)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:weaveopt")
    assert before - os.statvfs("/dev/shm").f_bfree < (64 << 20) // os.statvfs("/dev/shm").f_bsize


def test_without_a_driver_the_gpu_says_why() -> None:
    if not _native.has_cuda:
        assert gpus.why_no_host_memory(0) == "weaveopt was installed without its CUDA part"
    elif torch.cuda.is_available():
        assert gpus.why_no_host_memory(0) == "" and gpus.why_no_host_memory(10_000) == "there is no such GPU"
    else:
        assert gpus.why_no_host_memory(0), "the driver's own words"
        segment = _native.Segment.create(HEADER_BYTES, 7, 0, in_dev_shm=False)
        with pytest.raises(RuntimeError, match="cudaSetDevice"):
            _native.HostGroup([segment], 0, 0)


def test_no_process_changes_the_size_of_a_segment() -> None:
    segment = _native.Segment.create(PAGE, 1, 0, in_dev_shm=False)
    size = os.fstat(segment.fd).st_size
    for other in (0, size - PAGE, size + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, other)
    segment.close_fd()
