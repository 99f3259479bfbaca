"""Arena and topology on spawned ranks: growing, several groups, re-made groups, ranks that are late, die or stall."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.ranks import collect, free_port, run_ranks
from tests.ranks.shm_ranks import MAX_TOKENS, check, make_call, partial_of, reserve, run_op
from weaveopt.errors import AgreementError, ArenaError, PeerTimeoutError, WeaveError
from weaveopt.fabrics import shm, topology
from weaveopt.records.candidate import Fabric
from weaveopt.records.memory import Buffer, Lifetime, MemoryPlan
from weaveopt.solver.placement import PlacementRequest, place


def names_in_dev_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "weave" in name}


# --- groups


def run_grow(rank: int, world: int) -> None:
    call = make_call("grow", "0", world)
    with pytest.raises(ArenaError, match="no arena was reserved for group '0'"):
        run_op(call, partial_of(rank))
    small = reserve()
    assert reserve() is small and reserve(tokens=1) is small and shm.of("0") is small
    check(call, tuple(range(world)), rank)
    at_least = 10 * small.num_bytes
    large = reserve(floor_bytes=at_least)
    assert large is not small and small.closed and large.num_bytes == at_least
    assert large.buffer("partial").num_bytes > 9 * small.buffer("partial").num_bytes, "room for what comes"
    assert reserve(floor_bytes=at_least) is large is reserve(floor_bytes=small.num_bytes)
    with pytest.raises(ArenaError, match=r"no buffer 'mailboxes'; it was reserved with partial \(\d+ bytes\)"):
        large.buffer("mailboxes")
    with pytest.raises(ArenaError, match="released"):
        small.native  # noqa: B018
    with pytest.raises(ArenaError, match="outside the arena"):
        large.tensor(large.num_bytes - 4, (2,), torch.float32)
    assert large.tensor(64, (2, 3), torch.float32) is large.tensor(64, (2, 3), torch.float32)
    check(call, tuple(range(world)), rank, step=1)
    too_far = replace(call, site="far", output_offset=large.num_bytes)
    with pytest.raises(ArenaError, match="site far: its output of 4096 bytes does not fit the arena of group '0'"):
        run_op(too_far, partial_of(rank))
    assert reserve(tokens=2 * MAX_TOKENS) is large
    check(replace(call, site="more", max_tokens=2 * MAX_TOKENS), tuple(range(world)), rank)
    has = large.buffer("partial").num_bytes
    too_many = replace(call, site="many", max_tokens=32 * MAX_TOKENS)
    with pytest.raises(ArenaError, match=r"site many: its \w+ of \d+ bytes does not fit the arena of group '0'"):
        run_op(too_many, partial_of(rank))
    larger = reserve(tokens=32 * MAX_TOKENS)
    assert larger.buffer("partial").num_bytes == 262144 > 2 * has and larger.num_bytes > at_least
    assert reserve(tokens=33 * MAX_TOKENS).buffer("partial").num_bytes == 2 * 262144, "at least twice as large"
    check(too_many, tuple(range(world)), rank)
    with pytest.raises(WeaveError, match=r"expected 5 rows of 64 torch.float32"):
        run_op(call, partial_of(rank).to(torch.float16))
    shm.release("0")
    with pytest.raises(ArenaError, match="no arena was reserved"):
        run_op(call, partial_of(rank))


def run_filled(rank: int, world: int) -> None:
    """Buffers hold their fill before the first call in every new arena, each rank's part of it included."""
    known = topology.discover("0", 30.0)
    for num_bytes in (8, 4096):
        buffers = [Buffer("count", num_bytes, Lifetime.ARENA, fill=0x80000001), Buffer("other", 64, Lifetime.ARENA)]
        plan = MemoryPlan("0", Fabric.SHM, 0, place([PlacementRequest("site", buffer, 0, 0) for buffer in buffers]))
        memory = shm.reserve(known, plan, 0, 30.0)
        count, other = memory.buffer("count"), memory.buffer("other")
        assert set(memory.tensor(count.offset, (num_bytes // 4,), torch.int32).tolist()) == {-(2**31) + 1}
        assert not memory.tensor(other.offset, (64,), torch.uint8).any()
    shm.release("0")


def run_short_of_memory(rank: int, world: int) -> None:
    """All ranks raise an error that names the rank which cannot reserve its memory, or asks for another size."""
    with pytest.raises(ArenaError, match=r"rank 0: cannot reserve .* rank 1: cannot reserve"):
        reserve(floor_bytes=1 << 44)
    with pytest.raises(ArenaError, match=r"ask for arenas of different buffers: rank 0: .*; rank 1: .*\[16384, 4096"):
        reserve(tokens=MAX_TOKENS * (1 + rank))
    reserve()
    check(make_call("after", "0", world), tuple(range(world)), rank)


def run_remade_group(rank: int, world: int, port: int) -> None:
    first = reserve()
    call = make_call("again", "0", world)
    check(call, tuple(range(world)), rank)
    assert topology.discover("0", 30.0) is topology.discover("0", 30.0)
    known = topology.discover("0", 30.0)
    dist.destroy_process_group()
    assert first.closed
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    name = dist.distributed_c10d._get_default_group().group_name
    assert topology.discover(name, 30.0) is not known
    second = reserve(name)
    assert second is not first
    check(replace(call, group=name), tuple(range(world)), rank)


def run_all_of_these(rank: int, world: int, port: int) -> None:
    run_grow(rank, world)
    run_filled(rank, world)
    run_short_of_memory(rank, world)
    run_remade_group(rank, world, port)
    shm.release_all()
    run_epochs_wrap(rank, world)


def run_epochs_wrap(rank: int, world: int) -> None:
    name = dist.distributed_c10d._get_default_group().group_name
    shm.FIRST_EPOCH = 2**32 - 7
    memory = reserve(name)
    for step in range(20):
        check(make_call("wrap", name, world, one_shot=step % 3 != 0), tuple(range(world)), rank, step)
    assert memory.native.epoch == 13


def test_arena_grows_fails_is_remade_and_wraps() -> None:
    run_ranks(run_all_of_these, 2, 2, free_port())


def run_meshes(rank: int, world: int) -> None:
    """Rows, columns and all of a 2 x 2 mesh, in turn, each with its own arena."""
    members = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3))
    groups = [(ranks, dist.new_group(list(ranks))) for ranks in members]
    mine = [(ranks, group.group_name) for ranks, group in groups if rank in ranks]
    assert len({name for _, name in mine}) == 3
    memories = [reserve(name) for _, name in mine]
    assert len({id(memory) for memory in memories}) == 3
    for step in range(30):
        for ranks, name in mine[:: -1 if step % 2 else 1]:
            check(make_call("mesh", name, len(ranks), one_shot=step % 3 == 0), ranks, rank, step)


def test_several_groups_at_once() -> None:
    run_ranks(run_meshes, 4, 4)


# --- faults


@dataclass(frozen=True)
class Caught:
    """Error of a surviving rank, and the seconds until it was raised."""

    message: str
    seconds: float


def run_until_killed(rank: int, world: int, one_shot: bool) -> Caught | None:
    reserve()
    call = make_call("layers.7", "0", world, one_shot, timeout_s=60.0)
    for step in range(50):
        check(call, tuple(range(world)), rank, step)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError) as caught:
        run_op(call, partial_of(rank))
    seconds = time.monotonic() - start
    with pytest.raises(PeerTimeoutError, match="unusable since an earlier call failed"):
        run_op(call, partial_of(rank))
    return Caught(str(caught.value), seconds)


@pytest.mark.parametrize("one_shot", [True, False])
def test_a_killed_rank_ends_the_others_and_leaves_nothing(one_shot: bool) -> None:
    before = names_in_dev_shm()
    outcomes = collect(run_until_killed, 3, 3, one_shot)
    assert "exit code -9" in outcomes[1].error
    for outcome in (outcomes[0], outcomes[2]):
        caught = outcome.value
        assert isinstance(caught, Caught), outcome.error
        # Whoever sees the dead rank first tells the third one.
        assert "rank 1 exited" in caught.message or "gave up waiting" in caught.message
        assert "layers.7" in caught.message and "slot ready, expected epoch 51, seen 50" in caught.message
        assert caught.seconds < 10, "far below the timeout of 60 s"
    assert any("rank 1 exited" in str(outcome.value) for outcome in outcomes)
    assert names_in_dev_shm() <= before


def run_stalled(rank: int, world: int) -> Caught:
    reserve()
    call = make_call("stall", "0", world, timeout_s=1.0)
    store = c10d._get_default_store()
    store.set(f"pid/{rank}", str(os.getpid()))
    peer = int(store.get(f"pid/{1 - rank}"))
    check(call, tuple(range(world)), rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        # Goes on here when rank 0 has given up. Rank 0 had signalled this call's data, so the result is right.
        check(call, tuple(range(world)), rank)
    start = time.monotonic()
    try:
        with pytest.raises(PeerTimeoutError) as caught:
            run_op(call, partial_of(rank))
    finally:
        if rank == 0:
            os.kill(peer, signal.SIGCONT)
    return Caught(str(caught.value), time.monotonic() - start)


def test_a_stalled_rank_is_given_up_after_the_timeout() -> None:
    waiting, stalled = run_ranks(run_stalled, 2, 2)
    assert "rank 1 did not signal within 1 s (slot ready, expected epoch 2, seen 1)" in waiting.message
    assert 1.0 <= waiting.seconds < 8.0
    assert "rank 0 gave up waiting itself" in stalled.message or "rank 0 exited" in stalled.message


def run_different_calls(rank: int, world: int) -> tuple[str, str, str]:
    reserve()
    for step in range(3):
        check(make_call("both", "0", world), tuple(range(world)), rank, step)
    with pytest.raises(AgreementError) as caught:
        run_op(make_call("first" if rank == 0 else "second", "0", world), partial_of(rank))
    with pytest.raises(AgreementError, match="unusable since an earlier call failed"):
        run_op(make_call("both", "0", world), partial_of(rank))
    reserve(tokens=2 * MAX_TOKENS)
    with pytest.raises(AgreementError) as tokens:
        run_op(make_call("both", "0", world), partial_of(rank, tokens=4 + rank))
    reserve(tokens=3 * MAX_TOKENS)
    one = [make_call("one", "0", world, one_shot) for one_shot in (True, False)]
    for call in one:
        check(call, tuple(range(world)), rank)
    with pytest.raises(AgreementError) as twins:
        run_op(one[rank], partial_of(rank))
    return str(caught.value), str(tokens.value), str(twins.value)


def test_ranks_at_different_sites_or_token_counts_are_told() -> None:
    (site, tokens, twins), (_, other, _) = run_ranks(run_different_calls, 2, 2)
    assert "runs site first with 5 tokens, but rank 1 runs site unknown here" in site
    assert "runs site both with 4 tokens, but rank 1 runs site both with 5 tokens" in tokens
    assert "runs site both with 5 tokens, but rank 0 runs site both with 4 tokens" in other
    assert "runs site one with 5 tokens, but rank 1 runs a site of the same name and size" in twins


def run_missing(rank: int, world: int) -> str:
    if rank == 0:
        with pytest.raises(AgreementError) as caught:
            topology.discover("0", 0.5)
        return str(caught.value)
    return ""


def test_a_rank_that_never_comes_is_named() -> None:
    message = run_ranks(run_missing, 3, 3)[0]
    assert "ranks 1, 2 of (0, 1, 2) did not come within 0.5 s for the topology" in message
