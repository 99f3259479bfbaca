"""Exchanges of kernel times among threads that stand in for ranks: meshes, ranks that decline, ranks that are alone."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from tests.graphs.nonempty import some
from weaveopt.autotune import kernel_exchange
from weaveopt.autotune.kernel_exchange import KernelExchange, NoAgreementError, SharedTimes
from weaveopt.cost_model.timed import KernelShape, KernelTime
from weaveopt.fabrics.rounds import Rounds

Groups = tuple[tuple[int, ...], ...]
ONE: Groups = ((0, 1, 2, 3),)
MESH: Groups = ((0, 1), (2, 3), (0, 2), (1, 3))
OVERLAPPING: Groups = ((0, 1, 2, 3), (0, 1))
WORLD = 4
FIRST, SECOND = (KernelShape("gemm", "float32", size, (8, 8), "rc") for size in (16, 32))


class _ProcessGroup:
    def _get_sequence_number_for_group(self) -> int:
        return 0


@dataclass
class _Ranks:
    """Rounds of every rank in each of its groups."""

    groups: Groups
    process_groups: list[_ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = dist.HashStore()
        self.rounds: dict[tuple[int, int], Rounds] = {}
        for at, ranks in enumerate(self.groups):
            own = dist.PrefixStore(str(at), store)
            for index, rank in enumerate(ranks):
                self.process_groups.append(_ProcessGroup())
                made = Rounds(str(at), ranks, index, self.process_groups[-1], own, "127.0.0.1")  # type: ignore[arg-type]
                self.rounds[rank, at] = made

    def of(self, rank: int) -> list[int]:
        return [at for at, ranks in enumerate(self.groups) if rank in ranks]

    def exchange(self, rank: int, graph: str, declined: tuple[int, ...] = ()) -> KernelExchange:
        """The rank's exchange of a graph, in which it has no site to rewrite in the groups `declined`."""
        made = KernelExchange.__new__(KernelExchange)
        channels = {
            at: kernel_exchange._Channel(self.groups[at], self.rounds[rank, at], graph, "") for at in self.of(rank)
        }
        made._longest_s = 20.0
        made._channels = [channel for at, channel in channels.items() if at not in declined]
        for at in declined:
            channels[at].decline("has no site to rewrite in the group", 20.0)
        return made


def _shared(exchange: KernelExchange, rank: int, missing: int) -> SharedTimes | str:
    """The end of a rank, as `tune` goes: it knows one kernel, and times another where some rank lacks it."""
    try:
        found = exchange.shared([KernelTime(FIRST, rank + 1.0, 0.1)], missing)
        if found.num_missing:
            times = [*found.times.values(), KernelTime(SECOND, 10.0 * (rank + 1), 0.1)]
            return exchange.shared(times, 0, more_s=0.5)
        return found
    except NoAgreementError as error:
        return str(error)


def _run(ranks: _Ranks, graphs: list[dict[int, tuple[int, ...]]], missing: list[int]) -> list[list[SharedTimes | str]]:
    """Results of all ranks, by graph; `graphs[n][rank]` are the groups that a rank declines in.

    Ranks agree on what to rewrite in a graph before they compile the next one.
    """
    agreed = threading.Barrier(WORLD)
    found: list[list[SharedTimes | str]] = [["did not end"] * WORLD for _ in graphs]

    def run(rank: int) -> None:
        for number, declined in enumerate(graphs):
            exchange = ranks.exchange(rank, f"graph {number}", declined.get(rank, ()))
            found[number][rank] = _shared(exchange, rank, missing[number] if rank == 0 else 0)
            agreed.wait(60.0)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


@pytest.mark.parametrize("groups", [ONE, MESH, OVERLAPPING])
def test_all_ranks_use_the_longest_times_of_all(groups: Groups) -> None:
    results = _run(_Ranks(groups), [{}] * 4, [0, 1, 0, 2])
    for number, row in enumerate(some(results)):
        reached = [rank for rank in range(WORLD) if any(rank in ranks for ranks in groups)]
        for rank in some(reached):
            found = row[rank]
            assert isinstance(found, SharedTimes), found
            assert found.times[FIRST].us == 4.0
            assert (SECOND in found.times) == (number in (1, 3))
            assert SECOND not in found.times or found.times[SECOND].us == 40.0


@pytest.mark.parametrize("groups", [ONE, MESH, OVERLAPPING])
def test_a_rank_that_declines_keeps_nobody_waiting(groups: Groups) -> None:
    """In random groups and graphs: ranks of a group never end with different times, and the next graph is as before."""
    draw = random.Random(7)
    ranks = _Ranks(groups)
    graphs: list[dict[int, tuple[int, ...]]] = []
    for number in range(24):
        every = {rank: tuple(at for at in ranks.of(rank) if draw.random() < 0.15) for rank in range(WORLD)}
        graphs.append(every if number % 3 else {})
    results = _run(ranks, graphs, [draw.randrange(2) for _ in graphs])
    for number, row in enumerate(some(results)):
        assert "did not" not in " ".join(each for each in row if isinstance(each, str)), row
        for at, members in enumerate(groups):
            waited = [rank for rank in members if at not in graphs[number].get(rank, ())]
            told = [each.times for each in (row[rank] for rank in waited) if isinstance(each, SharedTimes)]
            assert all(each == told[0] for each in told), (number, at)
        if not graphs[number]:
            assert all(isinstance(each, SharedTimes) for each in row), row


def test_a_rank_that_is_alone_hears_that_its_peers_went_on() -> None:
    """Within seconds, though a rank that is late has a minute; and the next graph finds all ranks together."""
    ranks = _Ranks(ONE)
    assert all(isinstance(each, SharedTimes) for each in _run(ranks, [{}], [0])[0])
    for rank in range(WORLD):
        ranks.rounds[rank, 0].calls += int(rank != 2)
    alone = _shared(ranks.exchange(2, "another graph"), 2, 0)
    assert isinstance(alone, str) and "went on without compiling such a graph" in alone
    for rank in range(WORLD):
        ranks.rounds[rank, 0].calls = 1
    assert all(isinstance(each, SharedTimes) for each in _run(ranks, [{}], [1])[0])
