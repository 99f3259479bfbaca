"""The fused op among CPU ranks of several hosts: results, and what happens where ranks fail or disagree."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weaveopt
from tests.emulation import emulated_hosts
from tests.graphs.models import FAMILIES, load, save
from tests.ranks import collect, run_ranks
from tests.ranks.tcp_ranks import NUM_RESULTS, become_host, check, make_call, partial_of, reserve
from weaveopt.errors import ArenaError, WeaveError
from weaveopt.fabrics import tcp, topology
from weaveopt.ops.reduction.buffers import memory_plan
from weaveopt.ops.reduction.variant import Algorithm


@pytest.mark.parametrize(("world", "hosts"), [(2, 2), (4, 2), (6, 3), (7, 7)])
def test_results_are_the_references_and_equal_bit_for_bit(world: int, hosts: int) -> None:
    first, *others = run_ranks(check, world, world, hosts)
    assert len(first) == NUM_RESULTS and all(other == first for other in others)


def _run(call: object, rank: int, tokens: int = 5) -> None:
    partial = partial_of(rank, tokens, 0, torch.float32)
    torch.ops.weave.all_reduce_norm(partial, None, None, None, None, None, None, None, call.encode())  # type: ignore[attr-defined]


def _fails(rank: int, world: int, hosts: int, how: str, algorithm: Algorithm) -> tuple[str, str, float]:
    become_host(rank, world, hosts)
    reserve(world, hosts)
    call = make_call(world, hosts, algorithm, timeout_s=2.0)
    _run(call, rank)
    if rank == world - 1:
        if how == "killed":
            os.kill(os.getpid(), 9)
        if how == "late":
            time.sleep(6.0)
            return "", "", 0.0
        if how == "tokens":
            time.sleep(0.2)
    begin = time.monotonic()
    errors = []
    for _ in range(2):  # and it stays an error
        try:
            _run(call, rank, 4 if how == "tokens" and rank == world - 1 else 5)
        except WeaveError as error:
            errors.append(error)
    assert len(errors) == 2, "a result without the others"
    return type(errors[0]).__name__, str(errors[0]), time.monotonic() - begin


@pytest.mark.parametrize(("how", "names"), [("killed", {"PeerTimeoutError"}), ("late", {"PeerTimeoutError"}),
                                            ("tokens", {"AgreementError", "PeerTimeoutError"})])  # fmt: skip
@pytest.mark.parametrize(
    ("world", "hosts", "algorithm"),
    [(2, 2, Algorithm.TWO_SHOT), (4, 2, Algorithm.ONE_SHOT), (4, 4, Algorithm.DOUBLING), (3, 3, Algorithm.HALVING)],
)
def test_a_failure_is_an_error_on_every_rank_in_time(
    world: int, hosts: int, algorithm: Algorithm, how: str, names: set[str]
) -> None:
    found = collect(_fails, world, world, hosts, how, algorithm)
    alive = [outcome for outcome in found if outcome.rank != world - 1 or how == "tokens"]
    for outcome in alive:
        assert not outcome.error, outcome.error
        name, text, seconds = outcome.value  # type: ignore[misc]
        assert name in names and "site" in text and seconds < 8.0
    if how == "tokens":
        assert any(outcome.value[0] == "AgreementError" for outcome in alive)  # type: ignore[index]


def _uneven(rank: int) -> str:
    become_host(0 if rank < 2 else 1, 2, 2)
    with pytest.raises(ArenaError) as error:
        reserve(3, 2)
    return str(error.value)


def test_hosts_of_unequal_numbers_of_ranks_are_refused() -> None:
    assert all("hosts have [2, 1] ranks" in each for each in run_ranks(_uneven, 3))


def _grows(rank: int) -> bool:
    become_host(rank, 4, 2)
    call = make_call(4, 2)
    small = reserve(4, 2)
    _run(call, rank)
    larger = tcp.reserve(topology.discover("0", 30.0), memory_plan("0", [replace(call, max_tokens=400)]), 0, 30.0)
    wire = larger.wire
    with pytest.raises(ArenaError, match="was released"):
        _ = small.wire
    epoch = wire.epoch
    _run(call, rank)  # binds again
    return small.closed and not larger.closed and wire.epoch == epoch + 1 == 2


def test_a_larger_arena_keeps_the_connections() -> None:
    assert all(run_ranks(_grows, 4))


def _another_plan(rank: int) -> str:
    become_host(rank, 2, 2)
    reserve(2, 2)
    with pytest.raises(ArenaError) as error:
        _run(replace(make_call(2, 2), hosts=1), rank)
    return str(error.value)


def test_a_call_planned_for_other_hosts_is_refused() -> None:
    assert all("planned for 1 host, group has 2" in each for each in run_ranks(_another_plan, 2))


def _model(rank: int, folder: str) -> tuple[float, int, list[str]]:
    become_host(rank, 2, 2)
    llama = next(family for family in FAMILIES if family.name == "llama")
    if rank == 0:
        save(llama, folder)
    dist.barrier()
    model = load(llama, folder, 2)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, backend="weave", options={"strict": True})
        for _ in range(3):
            got = compiled(input_ids=ids, use_cache=False).logits
    (graph,) = weaveopt.report(compiled).graphs
    fabrics = [d.chosen.fabric.value for d in graph.decisions if d.rewritten and d.site.kind == "reduction"]
    return float((got - want).abs().max()), len(fabrics), sorted(set(fabrics))


def test_a_model_across_hosts_is_rewritten_and_computes_the_same(tmp_path: Path) -> None:
    for error, count, fabrics in run_ranks(_model, 2, str(tmp_path)):
        assert error < 1e-4 and count == 5 and fabrics == ["tcp"]


def test_hosts_with_networks_of_their_own() -> None:
    """Addresses, interfaces and routes as between machines, where the system lets them be made."""
    why = emulated_hosts.missing()
    if why:
        pytest.skip(why)
    with emulated_hosts.hosts(3, emulated_hosts.Link()) as made:
        found = emulated_hosts.finish(emulated_hosts.start(made, 1, "tests.ranks.tcp_ranks"), 100.0)
    assert [status for status, _ in found] == [0, 0, 0], found
    assert all(f"{NUM_RESULTS} results" in out for _, out in found)


def _sparse(rank: int) -> tuple[list[int], int, list[int], str, bool]:
    become_host(rank, 6, 6)
    small = reserve(6, 6, 30.0, Algorithm.DOUBLING)
    doubled = sorted(small.hosts.peers(small.wiring))
    _run(make_call(6, 6, Algorithm.DOUBLING), rank)
    with pytest.raises(ArenaError) as error:
        _run(make_call(6, 6, Algorithm.TWO_SHOT), rank)
    larger = reserve(6, 6)
    _run(make_call(6, 6, Algorithm.TWO_SHOT), rank)
    _run(make_call(6, 6, Algorithm.DOUBLING), rank)
    return doubled, len(larger.hosts.peers(larger.wiring)), sorted(larger.wiring), str(error.value), larger is small


def test_hosts_are_connected_as_exchanges_need_it() -> None:
    found = run_ranks(_sparse, 6)
    assert [peers for peers, *_ in found] == [[1, 2, 4], [0, 3, 5], [0, 3], [1, 2], [0], [1]]
    for _, num_peers, wiring, text, is_same in found:
        assert num_peers == 5 and is_same and wiring == ["doubling", "halving", "one_shot", "two_shot"]
        assert "has no connection to hosts" in text
