"""Arenas that torch maps by NVLink multicast: who gets one, and that it is checked on all ranks before it is used."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.fabrics.made_up_multicast import OFF, POINTER, MadeUpCalls, MadeUpTorch, make_up, new_group
from tests.fabrics.test_arena_gpu import HEADER_BYTES, TIMEOUT_S, plan_of
from tests.ranks import run_ranks
from weaveopt.errors import ArenaError, MulticastError
from weaveopt.fabrics import peer, symmetric, topology, traits
from weaveopt.fabrics.peer import PeerArena
from weaveopt.records.candidate import Fabric, Rejection

WHOLE = {"mailboxes": 1024, "output": 1024}


def reserve(group: str, fabric: Fabric = Fabric.MULTIMEM, **sizes: int) -> PeerArena:
    plan = replace(plan_of(**(sizes or WHOLE)), group=group, fabric=fabric)
    return peer.reserve(topology.discover(group, TIMEOUT_S), plan, 0, TIMEOUT_S)


def refusal(group: str) -> Rejection | None:
    """Rejection of `multimem` on GPUs that kernels were built for."""
    setattr(traits, "is_built", lambda part: True)  # noqa: B010
    return dict(topology.discover(group, TIMEOUT_S).fabrics())[Fabric.MULTIMEM]


def run_right(rank: int) -> None:
    made, calls = MadeUpTorch(), MadeUpCalls()
    make_up(rank, made, calls)
    group = new_group()
    assert refusal(group) is None, "torch makes mappings, and nothing was wrong yet"
    plain = reserve(group, Fabric.PEER)
    assert not plain.multicast and made.disabled == [True], "no multicast object where no plan asks for one"
    assert plain.native.multicast == 0 and calls.steps == []  # type: ignore[attr-defined]

    arena = reserve(group)
    assert arena.multicast and made.disabled == [True, False] and calls.steps == ["prepare", "run"]
    assert arena.native.multicast == POINTER  # type: ignore[attr-defined]
    assert plain.closed and arena is peer.of(group), "calls of both fabrics find their arena"
    assert arena.layout.holds(plain.layout), "calls of earlier graphs bind again to it"
    assert reserve(group) is arena and reserve(group, Fabric.PEER) is arena, "it serves both, and is checked once"
    assert calls.steps == ["prepare", "run"]

    larger = reserve(group, Fabric.PEER, output=1 << 16)
    assert larger.multicast and arena.closed, "calls by multicast bind to the larger arena as well"
    assert made.disabled == [True, False, False] and calls.steps == ["prepare", "run"] * 2
    assert refusal(group) is None
    assert symmetric._num_rendezvous == 3 and OFF not in made.environment and os.environ[OFF] == "1"


def test_plans_by_multicast_get_torchs_mapping_and_its_first_calls_are_checked() -> None:
    run_ranks(run_right, 2)


def run_wrong(rank: int) -> list[str]:
    """One rank of two has something against it; what both raise."""
    said = []
    for made, calls, steps in (
        (MadeUpTorch(), MadeUpCalls(says="3 of 9 elements are wrong" if rank == 1 else ""), ["prepare", "run"]),
        (MadeUpTorch(), MadeUpCalls(raises="run" if rank == 1 else ""), ["prepare", "run"]),
        (MadeUpTorch(), MadeUpCalls(raises="prepare" if rank == 0 else ""), ["prepare"]),
        (MadeUpTorch(pointer=0 if rank == 1 else POINTER), MadeUpCalls(), []),
    ):
        make_up(rank, made, calls)
        group = new_group()
        plain = reserve(group, Fabric.PEER)
        with pytest.raises(MulticastError) as caught:
            reserve(group, output=4096)
        assert calls.steps == steps, "no rank launches anything before all are prepared"
        refused = refusal(group)
        assert refused is not None and refused.code == "multicast_failed"
        [(_, why)] = refused.values
        assert str(why) in str(caught.value)
        said.append(str(why))
        assert peer.of(group) is plain and not plain.closed, "what was there stays"
        meetings = len(made.disabled)
        with pytest.raises(MulticastError, match="a first call by NVLink multicast was not right on all"):
            reserve(group, output=4096)
        assert len(made.disabled) == meetings, "for good: nothing is mapped again"
        assert not reserve(group, Fabric.PEER, output=4096).multicast and made.disabled[-1], (
            "GPUs still reach each other"
        )
    return said


def test_what_is_wrong_on_one_rank_is_left_by_all_for_good() -> None:
    one, other = run_ranks(run_wrong, 2)
    assert (
        one
        == other
        == [
            "rank 1: 3 of 9 elements are wrong",
            "rank 1: RuntimeError: cannot run",
            "rank 0: RuntimeError: cannot prepare",
            "rank 1: torch made no multicast mapping",
        ]
    )


def run_lost(rank: int) -> None:
    """A larger arena cannot have what the smaller has."""
    made, calls = MadeUpTorch(), MadeUpCalls()
    make_up(rank, made, calls)
    group = new_group()
    arena = reserve(group)
    calls.says = "wrong this time"
    with pytest.raises(ArenaError, match=r"earlier graphs of the group use it, so a larger arena needs it: .* time"):
        reserve(group, Fabric.PEER, output=1 << 20)
    assert peer.of(group) is arena and not arena.closed


def test_a_larger_arena_without_the_mapping_never_takes_its_place() -> None:
    run_ranks(run_lost, 2)


def run_off(rank: int) -> list[object]:
    """Switched off on rank 1 alone, by the variable; then unknown to the driver of rank 0."""
    found: list[object] = []
    for made in (
        MadeUpTorch(environment={OFF: "1"} if rank == 1 else {}),
        MadeUpTorch(supported=rank != 0),
        MadeUpTorch(environment={OFF: "yes"}),
        MadeUpTorch(environment={OFF: "0"}),
    ):
        make_up(rank, made, MadeUpCalls())
        before = dict(made.environment)
        group = new_group()
        refused = refusal(group)
        found.append(None if refused is None else (refused.code, refused.values))
        if refused is not None:
            with pytest.raises(MulticastError, match="torch makes no NVLink multicast mapping of a rank's memory"):
                reserve(group)
            assert made.disabled == [], "nobody met"
            reserve(group, Fabric.PEER)
            assert made.disabled == [True]
        assert made.environment == before, "as it was"
    return found


def test_the_variable_of_torch_switches_it_off() -> None:
    assert run_ranks(run_off, 2) == 2 * [[
        ("no_multicast", (("rank", 1), ("why", f"{OFF}=1 is set"))),
        ("no_multicast", (("rank", 0), ("why", "torch finds no multicast support of cuda:0 and its driver"))),
        ("no_multicast", (("rank", 0), ("why", f"{OFF}=yes is set"))),
        None,
    ]]  # fmt: skip


def test_a_rendezvous_that_asks_for_it_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(memory: torch.Tensor, process_group: object) -> object:
        raise RuntimeError("CUDA driver error: invalid argument\nand how it came")

    made = MadeUpTorch()
    monkeypatch.setattr(symmetric, "os", type("os", (), {"environ": made.environment}))
    monkeypatch.setattr(symmetric, "_join", meet)
    monkeypatch.setattr(symmetric, "_bounded", lambda *of: nullcontext())
    for asked in (True, False):
        monkeypatch.setattr(symmetric, "_failed", "")
        monkeypatch.setattr(symmetric, "_num_rendezvous", 0)
        with pytest.raises(RuntimeError, match="invalid argument"):
            symmetric.rendezvous(torch.zeros(1), None, 1.0, asked)  # type: ignore[arg-type]
        assert (f"start with {OFF}=1 to do without" in symmetric.failed()) is asked


def test_a_torch_that_knows_no_multicast_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "os", type("os", (), {"environ": {}}))
    monkeypatch.setattr(torch._C._distributed_c10d, "_SymmetricMemory", object())
    assert symmetric.why_no_multicast(0) == f"the symmetric memory of torch {torch.__version__} has no multicast"
    assert symmetric.multicast_pointer(object()) == 0  # type: ignore[arg-type]


def test_this_torch_is_asked_by_the_names_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU build it says that it has no allocator for GPUs, and nothing else goes wrong."""
    monkeypatch.setattr(symmetric, "os", type("os", (), {"environ": {}}))
    assert "multicast_ptr" in dir(torch._C._distributed_c10d._SymmetricMemory)
    if not torch.cuda.is_available():
        assert symmetric.why_no_multicast(0)


def test_headers_are_those_of_arenas_of_peers() -> None:
    assert traits.header_bytes(Fabric.MULTIMEM) == HEADER_BYTES
