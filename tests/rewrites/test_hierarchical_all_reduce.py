"""The rule: which groups it is for, what the price chooses between hosts, and a model across hosts against eager."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weaveopt
from tests.graphs.models import Family, load, save
from tests.graphs.nonempty import some
from tests.ranks import run_ranks
from tests.ranks.tcp_ranks import become_host, make_call
from weaveopt import cost_model
from weaveopt.cost_model.host_schedules import Then, host_schedule
from weaveopt.cost_model.machine import Link, Machine
from weaveopt.fabrics import topology
from weaveopt.fabrics.layout import Layout
from weaveopt.ops.reduction.buffers import locate, memory_plan
from weaveopt.ops.reduction.shm import native_site
from weaveopt.ops.reduction.variant import ALGORITHMS, Algorithm, Transfer
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan, FusedReductionTerms, candidates
from weaveopt.rewrites.reduction.lowering import memory_of
from weaveopt.sites.reduction.matcher import ReductionFacts

try:
    from weaveopt import _native
except ImportError:
    _native = None  # type: ignore[assignment]

RULE = "hierarchical_all_reduce"
HIDDEN = 4096
CALL = make_call(2, 2, Algorithm.DOUBLING, "bfloat16")


def machine_with(alpha_us: float, bytes_per_s: float, overhead_us: float = 0.0) -> Machine:
    return replace(cost_model.load("cpu"), inter_host=Link("between", alpha_us, bytes_per_s, overhead_us))


def proposed(
    machine: Machine, tokens: int, hosts: int, ranks_per_host: int = 1, *, most: int = 0, force: bool = True
) -> list[tuple[Candidate, FusedReductionPlan]]:
    world = hosts * ranks_per_host
    names = tuple(f"h{rank // ranks_per_host}" for rank in range(world))
    terms = FusedReductionTerms(
        RULE, True, replace(topology.fake(world), hosts=names), machine, against_library=not force
    )
    facts = ReductionFacts("0", world, hosts, HIDDEN, "bfloat16", gemm_depth=1024, sum_read_by_reductions=True)
    return list(candidates(facts, TokenCounts(tokens, most=most or tokens), terms))


def chosen(*args: int, machine: Machine, **options: int) -> str:
    allowed = [each for each, _ in proposed(machine, *args, **options) if each.allowed]  # type: ignore[arg-type]
    (one,) = allowed
    return one.variant


def test_only_fabrics_between_hosts_are_its_own() -> None:
    fabrics = {each.fabric for each, _ in proposed(cost_model.load("cpu"), 8, 2)}
    assert fabrics == {Fabric.TCP, Fabric.NVSHMEM}
    alone = {r.code for each, _ in proposed(cost_model.load("cpu"), 8, 1, 2) for r in each.rejections}
    assert "fabric_needs_hosts" in alone


def test_gpus_are_priced_and_wait_for_a_measurement() -> None:
    machine = cost_model.load("gh200-infiniband")
    terms = FusedReductionTerms(RULE, True, topology.fake(4, hosts=4, device="cuda"), machine, against_library=False)
    facts = ReductionFacts("0", 4, 4, HIDDEN, "bfloat16", gemm_depth=1024)
    found = {each.fabric: each for each, _ in candidates(facts, TokenCounts(8, most=8), terms)}
    joined = found[Fabric.NVSHMEM]
    assert [no.code for no in joined.rejections] == ["not_measured"]
    assert joined.estimate is not None and joined.estimate.us > 0
    assert not candidates(facts, TokenCounts(8, most=8), terms, usable_only=True)


def test_latency_bandwidth_and_messages_each_have_their_algorithm() -> None:
    far = machine_with(1000.0, 1.25e11)
    assert chosen(1, 8, machine=far) == "one_shot message", "one wait for the link"
    narrow = machine_with(1.0, 1.25e8)
    assert chosen(512, 8, machine=narrow) == "two_shot message", "fewest bytes"
    busy = machine_with(5.0, 1.25e10, 50.0)
    assert chosen(1, 16, machine=busy) == "doubling message", "fewest messages"
    assert chosen(2048, 64, machine=busy) == "halving message", "few messages, and few bytes"


def test_one_row_is_one_hosts_work_where_hosts_divide_rows() -> None:
    slow = machine_with(1.0, 1.25e8)
    few, many = ({each.variant: each.estimate for each, _ in proposed(slow, tokens, 8)} for tokens in (1, 8))
    for name in ("two_shot message", "halving message"):
        a, b = few[name], many[name]
        assert a is not None and b is not None and a.us > 0.8 * b.us


def test_two_hosts_of_one_rank_exchange_once() -> None:
    """Doubling is the same there, with one addition more."""
    assert chosen(4, 2, machine=machine_with(50.0, 1.25e9)) == "one_shot message"


def test_the_table_says_by_token_count_which_exchange_runs() -> None:
    found = proposed(machine_with(50.0, 1.25e9, 10.0), 8, 8, most=4096)
    (lowered,) = [lowered for candidate, lowered in found if candidate.allowed]
    bounds = [row.max_tokens for row in lowered.rows]
    assert bounds == sorted(bounds) and bounds[-1] == 4096 and len({row.algorithm for row in lowered.rows}) > 1
    memory = memory_of(lowered)
    assert memory.wiring == tuple(sorted({row.algorithm.value for row in lowered.rows}))
    for algorithm in {row.algorithm for row in lowered.rows}:
        assert algorithm in ALGORITHMS[Transfer.MESSAGE]


def test_the_library_stays_where_it_is_faster() -> None:
    quick = replace(machine_with(1e6, 1e6), relative_error=0.05)
    found = proposed(quick, 1, 2, force=False)
    codes = {r.code for each, _ in found if each.fabric is Fabric.TCP for r in each.rejections}
    slow = {r.code for each, _ in proposed(machine_with(50.0, 1.25e9), 64, 4, force=False) for r in each.rejections}
    assert codes <= {"library_faster", "slower_algorithm"} and "library_faster" not in slow


@pytest.mark.parametrize("hosts", [*range(2, 20), 32, 48, 100, 1000])
@pytest.mark.parametrize("algorithm", [Algorithm.DOUBLING, Algorithm.HALVING])
def test_native_schedules_are_those_that_are_priced(algorithm: Algorithm, hosts: int) -> None:
    exchange = getattr(_native.HostExchange, algorithm.value)
    for host in some(range(hosts) if hosts < 50 else (0, 1, hosts // 2, hosts - 1)):
        wanted = host_schedule(algorithm.value, host, hosts)
        found = _native.host_schedule(exchange, host, hosts)
        assert _native.host_parts(exchange, hosts) == wanted.num_parts
        sent = [(peer, begin, end) for peer, _, begin, end, _, _ in found if begin < end]
        assert sent == [(each.peer, each.begin, each.end) for one in wanted.rounds for each in one.sends]
        received = [(peer, begin, end, done) for peer, done, _, _, begin, end in found if begin < end]
        assert received == [
            (each.peer, each.begin, each.end, each.then is Then.COPY) for one in wanted.rounds for each in one.receives
        ]


@pytest.mark.parametrize("hosts", [2, 3, 16, 100, 1024])
def test_connections_and_memory_grow_with_the_logarithm_of_the_hosts(hosts: int) -> None:
    for name in ("doubling", "halving"):
        peers = _native.host_peers(getattr(_native.HostExchange, name), 0, hosts)
        assert len(peers) <= hosts.bit_length()
    assert len(_native.host_peers(_native.HostExchange.one_shot, 0, hosts)) == hosts - 1


def message_bytes(exchange: str, hosts: int, tokens: int = 4) -> int:
    """Bytes that native code reserves for the messages of host 0. All its connections lead to one socket."""
    plan = memory_plan("0", [CALL])
    segment = _native.Segment.create(plan.num_bytes, 1, 0)
    peers = _native.host_peers(getattr(_native.HostExchange, exchange), 0, hosts)
    own, other = socket.socketpair()
    with own, other:
        sockets = [os.dup(own.fileno()) if host in peers else -1 for host in range(hosts)]
    wire = _native.Connections(sockets, 0, 1, 0)  # which closes them
    site = native_site(CALL, CALL.encode(), locate(CALL, Layout.of(plan, 0)))
    site.max_tokens = tokens
    table = [(tokens, getattr(_native.HostExchange, exchange))]
    ranks = [[host] for host in range(hosts)]
    group = _native.Group([segment], 0, 1, 0)
    return _native.AllReduceNormOfHosts(group, wire, 0, ranks, table, site, 1).message_bytes


def test_memory_of_messages_grows_with_the_logarithm_of_the_hosts() -> None:
    rows = 4 * CALL.hidden
    for rounds in (1, 2, 6, 9):
        # Of each round a sum in fp32, and of the first one the partial results as they are.
        assert message_bytes("doubling", 1 << rounds) == rows * (4 * rounds + 2 * min(rounds, 2))
        assert message_bytes("halving", 1 << rounds) <= rows * (4 * rounds + 4)
        assert message_bytes("one_shot", 1 << rounds) == rows * 2 * ((1 << rounds) - 1)


def _model(rank: int, folder: str, world: int) -> tuple[float, list[tuple[str, str, str]]]:
    become_host(rank, world, world)
    llama = Family("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1})
    if rank == 0:
        save(llama, folder)
    dist.barrier()
    model = load(llama, folder, world)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, backend="weave", options={"strict": True, "force": [RULE]})
        for _ in range(3):
            got = compiled(input_ids=ids, use_cache=False).logits
    (graph,) = weaveopt.report(compiled).graphs
    made = [d.chosen for d in graph.decisions if d.rewritten and d.site.kind == "reduction"]
    return float((got - want).abs().max()), [(each.choice, each.fabric.value, each.variant) for each in made]


def test_a_model_across_four_hosts_computes_the_same(tmp_path: Path) -> None:
    for error, made in run_ranks(_model, 4, str(tmp_path), 4):
        assert error < 1e-4 and len(made) == 3
        assert {each[:2] for each in made} == {(RULE, "tcp")}
