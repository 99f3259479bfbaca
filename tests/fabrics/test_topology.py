"""Topologies that are made up, what they say of fabrics, and how ranks meet."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import run_ranks
from weaveopt.errors import AgreementError, ArenaError, WeaveError
from weaveopt.fabrics import shm, topology, traits
from weaveopt.fabrics.arena import transport
from weaveopt.fabrics.traits import TRAITS, NativePart, arena_fabric, header_bytes
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.records.memory import MemoryPlan


def codes(found: topology.Topology) -> dict[Fabric, str | None]:
    return {fabric: None if no is None else no.code for fabric, no in found.fabrics()}


def test_one_cpu_host_has_shm_and_library() -> None:
    found = topology.fake(4)
    assert (found.world, found.num_hosts, found.group.ranks) == (4, 1, (0, 1, 2, 3))
    assert codes(found) == {
        Fabric.MULTIMEM: "fabric_needs_cuda",
        Fabric.PEER: "fabric_needs_cuda",
        Fabric.HOST: "fabric_needs_cuda",
        Fabric.NVSHMEM: "fabric_needs_cuda",
        Fabric.SHM: None,
        Fabric.TCP: "fabric_needs_hosts",
        Fabric.LIBRARY: None,
    }


def test_two_hosts_have_the_library_and_tcp() -> None:
    found = topology.fake(6, hosts=2)
    assert found.hosts == ("host0",) * 3 + ("host1",) * 3
    assert codes(found)[Fabric.SHM] == "fabric_needs_one_host" and codes(found)[Fabric.LIBRARY] is None
    assert codes(found)[Fabric.TCP] is None
    rejection = dict(found.fabrics())[Fabric.SHM]
    assert isinstance(rejection, Rejection) and rejection.values == (("hosts", 2),)


def test_gpus_do_not_use_shm() -> None:
    assert codes(topology.fake(8, device="cuda"))[Fabric.SHM] == "fabric_needs_cpu"


def test_gpus_of_one_host_need_the_cuda_part(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replace(topology.fake(4, device="cuda"), fake=False)
    for built, code in ((True, None), (False, "cuda_part_missing")):
        monkeypatch.setattr(traits, "is_built", lambda part, built=built: built or part is not NativePart.CUDA)
        assert codes(real)[Fabric.PEER] == code
        assert codes(topology.fake(4, device="cuda"))[Fabric.PEER] is None, "a plan for another machine"
        assert codes(replace(real, hosts=("a", "a", "b", "b")))[Fabric.PEER] in (code, "fabric_needs_one_host")
    assert codes(real)[Fabric.LIBRARY] is None


def test_gpus_without_peer_access_have_no_fabric_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "is_built", lambda part: True)
    real = replace(topology.fake(4, device="cuda"), fake=False, no_peer_access=(2, 3))
    rejection = dict(real.fabrics())[Fabric.PEER]
    assert rejection is not None and rejection.code == "no_peer_access"
    assert rejection.values == (("rank", 2), ("peer", 3))
    assert codes(real)[Fabric.LIBRARY] is None


def make_up_gpus(rank: int, refused: set[tuple[int, int]], visible: int = 3) -> None:
    """Three GPUs of this host; `visible` of them are seen, from the own one on."""
    cuda: object = torch.cuda

    def properties(index: int) -> SimpleNamespace:
        gpu = (rank + index) % 3 if visible < 3 else index
        return SimpleNamespace(uuid=f"GPU-{gpu}", name=f"Made Up {gpu}", multi_processor_count=100 + gpu)

    own = 0 if visible < 3 else rank
    for name, function in {
        "is_available": lambda: True,
        "current_device": lambda: own,
        "device_count": lambda: visible,
        "get_device_properties": properties,
        "can_device_access_peer": lambda a, b: (a, b) not in refused,
    }.items():
        setattr(cuda, name, function)


def run_peer_access(rank: int) -> list[tuple[int, int] | None]:
    found = []
    for refused, visible in ((set(), 3), ({(1, 2)}, 3), ({(0, 1), (1, 0)}, 1)):
        make_up_gpus(rank, refused, visible)
        group = dist.new_group([0, 1, 2])
        known = topology.discover(group.group_name, 30.0)
        assert [gpu.name for gpu in known.gpus] == ["Made Up 0", "Made Up 1", "Made Up 2"]
        assert [gpu.processors for gpu in known.gpus] == [100, 101, 102]
        found.append(known.no_peer_access)
        assert known.no_multicast is not None, "the tests switch it off"
        assert (known.no_multicast.code, known.no_multicast.values[0]) == ("no_multicast", ("rank", 0))

    def forked() -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    cuda: object = torch.cuda
    setattr(cuda, "current_device", forked if rank == 2 else lambda: 0)  # noqa: B010
    known = topology.discover(dist.new_group([0, 1, 2]).group_name, 30.0)
    assert known.gpus == () and known.no_peer_access is None, "CPU ranks of a host with GPUs need none"
    assert known.no_multicast is not None, "nor is anything known of a GPU that cannot be asked"
    return found


def test_ranks_ask_whether_their_gpus_reach_each_other() -> None:
    """All hear of a pair that only one of it knows of; GPUs that a process does not see are not known to be apart."""
    assert run_ranks(run_peer_access, 3) == [[None, (1, 2), None]] * 3


def run_slow_readers(rank: int) -> list[str]:
    """Rank 0, which has the store, ends as soon as it may; the others are slow to read the exchanged records."""
    channel = topology.exchange(dist.new_group([0, 1, 2]).group_name, 30.0)
    if rank != 0:
        store = channel.store

        def read(key: str) -> bytes:
            time.sleep(0.25)
            return store.get(key)

        slow = SimpleNamespace(set=store.set, wait=store.wait, check=store.check, get=read)
        channel.store = slow  # type: ignore[assignment]
    answers = channel.gather({"text": f"of {rank}"}, "a test", 30.0)
    channel.settle()
    return [str(each["text"]) for each in answers]


def test_whoever_has_the_store_stays_until_all_have_read() -> None:
    assert run_ranks(run_slow_readers, 3) == [["of 0", "of 1", "of 2"]] * 3


def run_one_absent(rank: int) -> float:
    """Seconds until the exchange, to which rank 2 never comes and rank 1 comes late, is an error here."""
    channel = topology.exchange(dist.new_group([0, 1, 2]).group_name, 30.0)
    dist.barrier()
    began = time.monotonic()
    if rank < 2:
        time.sleep(0.5 * rank)
        with pytest.raises(AgreementError, match=r"rank 2 of \(0, 1, 2\) did not come within 1 s for a test"):
            channel.gather({"text": ""}, "a test", 1.0)
    took_s = time.monotonic() - began
    dist.barrier()
    return took_s


def test_whoever_has_the_store_stays_until_all_that_came_know_who_did_not() -> None:
    first, second, _ = run_ranks(run_one_absent, 3)
    assert 1.5 <= second <= first + 0.1, (first, second)
    assert first < 4.0, "nobody waits for the one that did not come"


def test_ranks_that_do_not_spread_evenly_are_refused() -> None:
    with pytest.raises(WeaveError, match="cannot spread 5 ranks evenly over 2 hosts"):
        topology.fake(5, hosts=2)


def test_a_fake_process_group_is_not_asked() -> None:
    with pytest.raises(WeaveError, match="no process group 'nowhere'"):
        topology.process_group("nowhere")
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    try:
        name = dist.distributed_c10d._get_default_group().group_name
        found = topology.discover(name, 0.1)
        assert found.fake and found.world == 8 and found.group.rank == 2 and found.num_hosts == 1
        with pytest.raises(ArenaError, match="without peers"):
            shm.reserve(found, MemoryPlan(name, Fabric.SHM, 0), 4096, 0.1)
        with pytest.raises(WeaveError, match="is fake"):
            topology.exchange(name, 0.1)
    finally:
        dist.destroy_process_group()


def test_every_fabric_has_traits() -> None:
    assert set(TRAITS) == set(Fabric)
    assert [fabric for fabric in Fabric if TRAITS[fabric].crosses_hosts] == [Fabric.TCP, Fabric.NVSHMEM, Fabric.LIBRARY]
    assert header_bytes(Fabric.SHM) == 0 < header_bytes(Fabric.PEER) == header_bytes(Fabric.MULTIMEM)


def test_one_arena_serves_all_kernels_of_a_group() -> None:
    assert arena_fabric([Fabric.PEER, Fabric.MULTIMEM]) is Fabric.MULTIMEM, "what it maps, peers reach too"
    assert arena_fabric([Fabric.SHM, Fabric.SHM]) is Fabric.SHM
    with pytest.raises(AssertionError, match="no arena serves sites on"):
        arena_fabric([Fabric.SHM, Fabric.PEER])


def test_fabrics_without_a_transport_say_so() -> None:
    assert transport(Fabric.SHM) is shm
    assert transport(Fabric.MULTIMEM) is transport(Fabric.PEER), "an arena of one serves the other"
    with pytest.raises(ArenaError, match=r"library has no arena .*: host, multimem, nvshmem, peer, shm, tcp\)"):
        transport(Fabric.LIBRARY)


def test_hosts_of_unequal_numbers_of_ranks_are_refused_for_tcp() -> None:
    even = topology.fake(4, hosts=2)
    uneven = replace(even, hosts=("host0", "host0", "host0", "host1"))
    assert codes(even)[Fabric.TCP] is None and codes(uneven)[Fabric.TCP] == "uneven_hosts"
    assert codes(uneven)[Fabric.LIBRARY] is None
