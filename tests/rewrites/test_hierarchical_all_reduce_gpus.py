"""The rule between GPUs of several hosts: chosen by price from measured times, left with a reason without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulation.gpu_hosts import CPU, flagged_us, kernel_us, library_us, machine, measured
from weaveopt import cost_model
from weaveopt.cli.main import main
from weaveopt.cost_model.machine import Machine
from weaveopt.fabrics import topology
from weaveopt.ops.reduction.prices.estimate import estimate_unfused
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import KernelRow
from weaveopt.records.candidate import Candidate, Fabric
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction.candidates import FusedReductionPlan, FusedReductionTerms, candidates
from weaveopt.rewrites.reduction.lowering import memory_of
from weaveopt.sites.reduction.matcher import ReductionFacts

RULE = "hierarchical_all_reduce"
HIDDEN = 8192


def on_nvshmem(
    made: Machine,
    tokens: int,
    hosts: int = 2,
    ranks_per_host: int = 1,
    *,
    most: int = 0,
    hidden: int = HIDDEN,
    dtype: str = "bfloat16",
) -> tuple[Candidate, FusedReductionPlan]:
    world = hosts * ranks_per_host
    terms = FusedReductionTerms(
        RULE, True, topology.fake(world, hosts=hosts, device="cuda"), made, against_library=True
    )
    facts = ReductionFacts("0", world, hosts, hidden, dtype, gemm_depth=1024)
    found = candidates(facts, TokenCounts(tokens, most=most or tokens), terms)
    (joined,) = [each for each in found if each[0].fabric is Fabric.NVSHMEM]
    return joined


def codes(*args: object, **options: object) -> list[str]:
    return [no.code for no in on_nvshmem(*args, **options)[0].rejections]  # type: ignore[arg-type]


def test_decode_goes_over_nvshmem_and_prefill_through_the_library() -> None:
    made = machine()
    for tokens in (1, 8, 64):
        candidate, lowered = on_nvshmem(made, tokens)
        assert candidate.allowed and candidate.variant == "doubling packet" and lowered.rows[-1].max_tokens == tokens
        assert dict(candidate.parameters)["measured"] is True
        assert candidate.estimate is not None and not lowered.takes_gemm
        assert candidate.estimate.us == pytest.approx(kernel_us(tokens * HIDDEN * 2), rel=0.05)
    assert codes(made, 512) == ["library_faster"]
    assert codes(made, 1024) == ["beyond_measured", "library_faster"]


def test_the_table_ends_where_the_library_is_faster_and_so_does_its_memory() -> None:
    made = machine()
    candidate, lowered = on_nvshmem(made, 8, most=8192)
    (row,) = lowered.rows
    assert candidate.allowed and row.variant == "doubling packet" and 64 < row.max_tokens < 512
    end = row.max_tokens

    def library(tokens: int) -> float:
        return estimate_unfused(made, Workload(tokens, tokens, HIDDEN, "bfloat16", 2, 2)).us

    assert kernel_us(end * HIDDEN * 2) <= library(end) * 1.02
    assert kernel_us((end + 8) * HIDDEN * 2) > library(end + 8) * 0.98
    whole, part = (memory_of(replace(lowered, rows=(KernelRow(most, row.algorithm, row.transfer),)))
                   for most in (8192, end))  # fmt: skip
    assert memory_of(lowered).buffers == part.buffers != whole.buffers


def test_the_transfer_that_is_faster_serves_each_token_count() -> None:
    """Packets below, rows as they are above; a profile without times of those has packets alone."""
    made = machine(flagged=flagged_us, library=lambda size: 100.0)
    cross = (8.0 - 5.8) / (1 / 1.4e5 - 1 / 2.8e5)
    terms = FusedReductionTerms(RULE, True, topology.fake(2, hosts=2, device="cuda"), made, against_library=True)
    facts = ReductionFacts("0", 2, 2, HIDDEN, "bfloat16", gemm_depth=1024)
    for tokens, chosen in ((1, "doubling packet"), (8, "doubling packet"), (64, "doubling flagged_row")):
        found = candidates(facts, TokenCounts(tokens, most=tokens), terms)
        here = {each.variant: each for each, _ in found if each.fabric is Fabric.NVSHMEM}
        assert {name for name, each in here.items() if each.allowed} == {chosen}
        (other,) = (each for name, each in here.items() if name != chosen)
        assert [no.code for no in other.rejections] == ["slower_algorithm"]
    found = candidates(facts, TokenCounts(8, most=512), terms)
    (lowered,) = (plan for each, plan in found if each.variant == "doubling packet")
    below, above = lowered.rows
    assert (below.variant, above.variant) == ("doubling packet", "doubling flagged_row") and above.max_tokens == 512
    assert below.max_tokens * HIDDEN * 2 == pytest.approx(cross, rel=0.1)
    buffers = {each.buffer.name: each.buffer.num_bytes for each in memory_of(lowered).buffers}
    assert buffers["host_inbox"] >= 2 * below.max_tokens * HIDDEN * 8 > buffers["host_inbox"] / 2
    assert buffers["host_row_inbox"] == buffers["host_row_outbox"] == 2 * 512 * HIDDEN * 4
    assert buffers["host_flags"] == 2 * 512 * 8
    (only,) = on_nvshmem(machine(library=lambda size: 100.0), 8, most=512)[1].rows
    assert only.variant == "doubling packet"


def test_where_the_library_is_faster_it_stays() -> None:
    slow = machine(lambda size: library_us(size) + 10.0)
    assert codes(slow, 8) == ["library_faster"]
    fast = machine(library=lambda size: kernel_us(size) / 4)
    assert codes(fast, 8) == ["library_faster"]


def test_without_times_nothing_is_chosen() -> None:
    for name in ("h100x2", "gh200-infiniband", "a100x4-slingshot"):
        assert codes(cost_model.load(name), 8)[-1] == "not_measured"
    assert codes(cost_model.load("gh200-infiniband"), 8) == ["not_measured"]
    # NCCL alone is no time of the kernel.
    made = machine(base="gh200-infiniband")
    bare = replace(
        made,
        fabric_costs=tuple(
            replace(costs, curves=()) if costs.fabric is Fabric.NVSHMEM else costs for costs in made.fabric_costs
        ),
    )
    assert codes(bare, 8) == ["not_measured"] and codes(made, 8) == []


def test_hosts_of_several_gpus_need_times_of_as_many() -> None:
    """Times of other hosts say nothing, nor does the library's time there."""
    assert codes(machine(), 8, 2, 2) == ["not_measured"]
    assert codes(cost_model.load("a100x4-slingshot"), 8, 2, 4) == ["not_measured"]
    both = measured(ranks_of_host=4).renewed(machine(), "both", CPU)
    assert codes(both, 8, 2, 4) == [] and codes(both, 8, 2, 1) == [] and codes(both, 8, 2, 2) == ["not_measured"]
    candidate, lowered = on_nvshmem(both, 8, 2, 4, most=512)
    assert candidate.estimate is not None and dict(candidate.parameters)["measured"] is True
    assert candidate.estimate.us == pytest.approx(kernel_us(8 * HIDDEN * 2), rel=0.05)
    assert estimate_unfused(both, Workload(8, 8, HIDDEN, "bfloat16", 8, 2)).us > library_us(8 * HIDDEN * 2)
    most = lowered.rows[-1].max_tokens
    buffers = {each.buffer.name: each.buffer.num_bytes for each in memory_of(lowered).buffers}
    # A rank adds a quarter of the rows; one slot of another host, 3 of partial and 3 of finished rows.
    rows = -(-most // 4)
    assert buffers["host_sums"] == rows * HIDDEN * 4
    assert buffers["host_inbox"] == 2 * -(-7 * (16 + rows * HIDDEN * 8) // 256) * 256


def test_more_hosts_of_several_gpus_take_as_many_rounds_more() -> None:
    """Only sums are sent between them, of 4 bytes."""
    made = machine(ranks_of_host=2)
    took = {}
    for hosts in (2, 4):
        estimate = on_nvshmem(made, 8, hosts, 2)[0].estimate
        assert estimate is not None
        took[hosts] = {term.name: term.us for term in estimate.terms}
    assert took[4]["synchronize"] == pytest.approx(2 * took[2]["synchronize"])
    moved = {hosts: terms["reduce"] + terms["norm"] for hosts, terms in took.items()}
    assert moved[4] == pytest.approx(2 * moved[2])


def test_more_hosts_take_as_many_rounds_more() -> None:
    made = machine()
    took = {}
    for hosts in (2, 4, 8, 3):
        estimate = on_nvshmem(made, 8, hosts)[0].estimate
        assert estimate is not None
        took[hosts] = {term.name: term.us for term in estimate.terms}
    latency_us = kernel_us(HIDDEN * 2)
    for hosts, rounds in ((2, 1), (4, 2), (8, 3), (3, 3)):
        assert took[hosts]["synchronize"] == pytest.approx(rounds * latency_us, rel=1e-3)
    moved = {hosts: terms["reduce"] + terms["norm"] for hosts, terms in took.items()}
    assert moved[4] == pytest.approx(3 * moved[2]) and moved[8] == pytest.approx(5 * moved[2])
    assert dict(on_nvshmem(made, 8, 4)[0].parameters)["measured"] is False
    assert codes(made, 8, 4) == [], "12 us of latency and the kernel behind NCCL's are less"
    assert codes(made, 8, 64) == ["library_faster"], "6 rounds are more than NCCL is known to take"
    both = measured(lambda size: 3 * kernel_us(size), lambda size: 6 * library_us(size), 64).renewed(made, "both", CPU)
    assert codes(both, 8, 64) == [], "measured there"


def test_rows_that_are_longer_than_any_that_were_measured_are_left() -> None:
    assert codes(machine(), 8, hidden=16384) == []
    assert codes(machine(), 8, hidden=16384, dtype="float32") == ["beyond_measured"]
    assert "beyond_measured" in codes(machine(), 8, hidden=32768)


@pytest.mark.parametrize(("tokens", "chosen"), [(8, (RULE, "nvshmem")), (4096, ("leave", "library"))])
def test_explain_chooses_by_price(
    tokens: int, chosen: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    path.write_text(cost_model.dumps(machine()))
    asked = ["explain", "llama-3.3-70b", "--layers", "1", "--tp", "2", "--nodes", "2", "--tokens", str(tokens)]
    assert main([*asked, "--machine", str(path), "--format", "json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    reductions = [site for site in graph["sites"] if "all_reduce" in site["form"]]
    assert reductions and all((site["choice"], site["fabric"]) == chosen for site in reductions)
    assert all(site["predicted_us"] <= site["unfused_us"] for site in reductions)


def test_explain_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["explain", "llama-3.3-70b", "--layers", "1", "--tp", "2", "--nodes", "2", "--tokens", "8"]
    assert main([*asked, "--machine", "gh200-infiniband", "--format", "json"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    for site in (each for each in graph["sites"] if "all_reduce" in each["form"]):
        assert site["choice"] == "leave"
        (joined,) = [each for each in site["alternatives"] if (each["choice"], each["fabric"]) == (RULE, "nvshmem")]
        assert [no["code"] for no in joined["rejected"]] == ["not_measured"]
