"""Which sums stay sharded: what is priced is what is laid out, only between sites that divide their tokens alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.fx as fx

from tests.graphs.reductions import Reductions, reduction_of, total_of
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Term
from weaveopt.records.memory import Lifetime
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan, FusedReductionTerms, candidates
from weaveopt.rewrites.reduction.lowering import memory_of
from weaveopt.rewrites.reduction.sharding import sharded_values, shared_sums
from weaveopt.rule import Chosen, FoundSite, PricedSite, Proposal

WORKLOAD = Workload(64, 64, 1024, "bfloat16", 2)
EMPTY_WORD = 0x80000000
"""Word that marks an empty packet, and that no packet holds."""
LOWERED = FusedReductionPlan(WORKLOAD, Fabric.SHM, "0", ("0", Fabric.SHM), gather_us=7.0)


def chosen(found: FoundSite, lowered: object = LOWERED) -> Chosen:
    return Chosen(found, Proposal(Candidate("rule", Fabric.SHM), reduction_of(found).interior, lowered))


def priced(found: FoundSite, *lowered: FusedReductionPlan) -> PricedSite:
    estimate = Estimate((Term("all", 1.0),))
    proposals = tuple(Proposal(Candidate("rule", each.fabric, "", (), estimate), plan=each) for each in lowered)
    return PricedSite(found, estimate, proposals, tuple(range(len(proposals))))


def pair(*, read_elsewhere: bool = False) -> tuple[FoundSite, FoundSite]:
    """The first one's sum is the residual of the second."""
    made = Reductions()
    first = made.site()
    if read_elsewhere:
        made.call(len, total_of(first))
    return first, made.site(total_of(first))


def test_a_sum_that_the_next_site_alone_reads_stays_sharded() -> None:
    first, second = pair()
    assert sharded_values([chosen(first), chosen(second)]) == {total_of(first)}
    (found,) = shared_sums([first, second])
    assert (found.sites, found.term) == ((0, 1), "gather")
    assert found.terms([priced(first, LOWERED), priced(second, LOWERED)]) == {(0, 0): -7.0}


def test_a_sum_that_anything_else_reads_is_whole() -> None:
    first, second = pair(read_elsewhere=True)
    assert sharded_values([chosen(first), chosen(second)]) == set()
    assert shared_sums([first, second]) == ()


def test_a_site_that_is_left_or_another_rules_reads_the_whole_sum() -> None:
    first, second = pair()
    assert sharded_values([chosen(first)]) == set()
    assert sharded_values([chosen(first), chosen(second, "another rule's")]) == set()


def division(
    tokens: int = 64, group: str = "0", fabric: Fabric = Fabric.SHM, one_shot_max_tokens: int = 4, ctas: int = 64
) -> tuple[object, ...]:
    """As the rule's candidates say it for such a site."""
    return (group, fabric, Algorithm.TWO_SHOT, 2, 1024, "bfloat16", tokens, tokens, one_shot_max_tokens, ctas)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({}, True),
        ({"tokens": 65}, False),
        ({"group": "1"}, False),
        ({"fabric": Fabric.PEER}, False),
        ({"one_shot_max_tokens": 5}, False),
        ({"ctas": 32}, False),
    ],
)
def test_only_between_sites_that_divide_alike(other: dict[str, object], alike: bool) -> None:
    first, second = pair()
    a = replace(LOWERED, division=division())
    b = replace(LOWERED, division=division(**other))  # type: ignore[arg-type]
    assert sharded_values([chosen(first, a), chosen(second, b)]) == ({total_of(first)} if alike else set())
    (found,) = shared_sums([first, second])
    assert found.terms([priced(first, a), priced(second, b)]) == ({(0, 0): -7.0} if alike else {})


def test_a_norm_left_in_the_graph_reads_the_whole_sum_and_takes_a_sharded_residual() -> None:
    first, second = pair()
    whole, apart = replace(LOWERED, division=division()), replace(LOWERED, division=division(), unfused_norm=True)
    assert sharded_values([chosen(first, apart), chosen(second, whole)]) == set()
    assert sharded_values([chosen(first, whole), chosen(second, apart)]) == {total_of(first)}
    (found,) = shared_sums([first, second])
    assert found.terms([priced(first, apart), priced(second, whole)]) == {}
    assert found.terms([priced(first, whole), priced(second, apart)]) == {(0, 0): -7.0}


def test_the_rules_candidates_divide_alike_where_all_that_counts_is_equal() -> None:
    """Another GEMM makes no other division; another token count, table or hidden size does."""
    from weaveopt import cost_model
    from weaveopt.fabrics import topology
    from weaveopt.records.site import TokenCounts
    from weaveopt.sites.reduction.matcher import ReductionFacts

    terms = FusedReductionTerms(
        "all_reduce_rms_norm", False, topology.fake(4, device="cuda"), cost_model.load("h200x4"), against_library=False
    )
    facts = ReductionFacts("0", 4, 1, 8192, "bfloat16", gemm_depth=2048)

    def divisions(known: ReductionFacts, tokens: TokenCounts) -> list[tuple[object, ...]]:
        return [lowered.division for candidate, lowered in candidates(known, tokens, terms) if candidate.allowed]

    here = divisions(facts, TokenCounts(64))
    assert len(set(here)) == 1
    assert divisions(replace(facts, gemm_depth=7168, num_norms=2), TokenCounts(64)) == here
    assert set(divisions(replace(facts, has_norm=False, num_norms=0), TokenCounts(64))) == set(here)
    assert divisions(facts, TokenCounts(65)) != here
    assert divisions(facts, TokenCounts(64, most=8192)) != here
    assert divisions(replace(facts, hidden=4096), TokenCounts(64)) != here
    assert divisions(replace(facts, dtype="float32"), TokenCounts(64)) != here


@pytest.mark.parametrize("num_readers", [1, 2, 3])
@pytest.mark.parametrize("covering", [False, True])
def test_what_is_priced_is_what_is_laid_out(num_readers: int, covering: bool) -> None:
    """For every set of choices of a sum's maker and readers, on two fabrics."""
    made = Reductions()
    first = made.site()
    readers: list[FoundSite] = []
    for index in range(num_readers):
        # The last one may take in all that reads the sum.
        sharing = [total_of(each) for each in readers] if covering and index == num_readers - 1 else ()
        readers.append(made.site(total_of(first), sharing=sharing))
    sites = [first, *readers]
    ways = (LOWERED, replace(LOWERED, division=("0", Fabric.PEER), fabric=Fabric.PEER, gather_us=3.0))
    (found,) = shared_sums(sites)
    terms = found.terms([priced(site, *ways) for site in sites])

    def laid_out(choices: Sequence[int]) -> frozenset[fx.Node]:
        rows = [chosen(s, ways[c]) for s, c in zip(sites, choices, strict=True) if c < len(ways)]
        return sharded_values(rows)

    for choices in itertools.product(range(len(ways) + 1), repeat=len(sites)):
        assert (total_of(first) in laid_out(choices)) is (choices in terms), choices
        if choices in terms:
            assert terms[choices] == -ways[choices[0]].gather_us
    assert (0,) * len(sites) in terms


def test_memory_of_shm_is_the_ops_need_for_the_widest_rows() -> None:
    (output, partial) = (request.buffer for request in memory_of(LOWERED).buffers)
    assert (partial.name, partial.num_bytes) == ("partial", 2 * 64 * 1024 * 2), "two, used in turn"
    assert (output.name, output.num_bytes) == ("output", 32 * 1024 * (4 + 2)), "fp32 rows, and rows of the sum"
    assert (partial.lifetime, output.lifetime) == (Lifetime.ARENA, Lifetime.CALL)
    assert {partial.alignment, output.alignment} == {4096}


def test_memory_on_gpus_has_room_for_every_row_of_the_table() -> None:
    rows = (
        KernelRow(8, Algorithm.ONE_SHOT, Transfer.LL_PACKET),
        KernelRow(32, Algorithm.TWO_SHOT, Transfer.LL_PACKET),
        KernelRow(64, Algorithm.TWO_SHOT, Transfer.BULK, 64),
    )

    def sizes(*table: KernelRow) -> dict[str, int]:
        lowered = replace(LOWERED, fabric=Fabric.PEER, rows=table)
        return {request.buffer.name: request.buffer.num_bytes for request in memory_of(lowered).buffers}

    singles = [sizes(row) for row in rows]
    assert sizes(*rows) == {
        name: max(single.get(name, 0) for single in singles) for name in ("mailboxes", "staging", "output")
    }
    filled = {r.buffer.name: r.buffer.fill for r in memory_of(replace(LOWERED, fabric=Fabric.PEER, rows=rows)).buffers}
    assert filled == {"mailboxes": EMPTY_WORD, "staging": None, "output": None}
