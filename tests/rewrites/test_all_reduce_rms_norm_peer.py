"""The rule on GPUs that reach each other's memory: the GEMM stays in the graph, the call holds a run-time table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx

from tests.graphs import forms
from tests.graphs.calls import calls, needed, sharded, sizes, targets
from tests.graphs.dtyped import forms_with, name_of
from tests.graphs.preview import FORCED, previewed
from tests.rewrites.test_all_reduce_rms_norm import EXPECTED, inputs
from weaveopt import cost_model
from weaveopt.cost_model.machine import Curve, Machine, Point
from weaveopt.fabrics import topology, traits
from weaveopt.ops.reduction.buffers import RowFormat
from weaveopt.ops.reduction.prices.estimate import estimate_fused
from weaveopt.ops.reduction.prices.workload import Workload
from weaveopt.ops.reduction.variant import Algorithm, KernelRow, Transfer, variant_name
from weaveopt.records.candidate import Candidate, Estimate, Fabric, Rejection, TableRow, Term
from weaveopt.records.report import GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.rewrites.reduction.candidates import FusedReductionTerms, candidates
from weaveopt.sites.reduction.matcher import ReductionFacts

H200 = cost_model.load("h200x4")
MULTIMEM = (Fabric.MULTIMEM, "two_shot direct")


def on_gpus(
    form: Callable[..., object],
    dtype: torch.dtype = torch.bfloat16,
    *,
    static: bool = True,
    world: int = 4,
    machine: str = "h200x4",
    force: tuple[str, ...] = (),
) -> GraphReport:
    weights = forms.make_weights(dtype)
    return previewed(
        lambda x, r: form(weights, x, r),
        inputs(dtype),
        world=world,
        machine=machine,
        device="cuda",
        static=static,
        force=force,
    )


def table_of(rows: Sequence[KernelRow]) -> tuple[TableRow, ...]:
    """A run-time table as reports print it."""
    return tuple(
        TableRow(
            row.max_tokens,
            f"{row.algorithm.value} {row.transfer.value}",
            (("num_ctas", row.num_ctas),) * bool(row.num_ctas),
        )
        for row in rows
    )


@pytest.mark.parametrize(("form", "dtype"), forms_with(torch.bfloat16, torch.float16, torch.float32), ids=name_of)
def test_every_form_is_rewritten_and_keeps_its_products(
    form: Callable[..., object], dtype: torch.dtype, graphs: list[fx.Graph]
) -> None:
    report = on_gpus(form, dtype, force=FORCED)
    assert report.fallbacks == ()
    told = [d.site.description.partition(" (node ")[0] for d in report.decisions]
    assert told == [EXPECTED[form.__name__]] * (3 if form is forms.chain else 1)
    assert {d.chosen.fabric for d in report.decisions} == {Fabric.PEER}
    found = targets(graphs[-1])
    assert found.count("weave.all_reduce_norm.default") == len(report.decisions)
    assert "weave.mm_all_reduce_norm.default" not in found and not any("c10d" in target for target in found)
    for node in graphs[-1].nodes:
        if node.target is torch.ops.weave.all_reduce_norm.default:
            exchanged = torch.bfloat16 if form is forms.residual_in_fp32 else dtype
            assert node.args[0].meta["val"].dtype is exchanged
    for call, decision in zip(calls(graphs[-1]), report.decisions, strict=True):
        assert table_of(call.table) == decision.chosen.table
        assert call.max_tokens == call.table[-1].max_tokens


def test_products_that_meet_are_added_first(graphs: list[fx.Graph]) -> None:
    report = on_gpus(forms.cohere)
    (decision,) = report.decisions
    assert decision.rewritten and decision.chosen.estimate is not None
    assert targets(graphs[-1]).count("aten.mm.default") == 3  # two products and the one behind the norm
    (node,) = graphs[-1].find_nodes(op="call_function", target=torch.ops.weave.all_reduce_norm.default)
    assert node.args[0].target is torch.ops.aten.add.Tensor
    names = [term.name for term in decision.chosen.estimate.terms]
    assert "add" in names and "copy" not in names


@pytest.mark.parametrize(("static", "max_tokens"), [(True, 14), (False, 8192)])
def test_the_table_covers_what_may_come(static: bool, max_tokens: int, graphs: list[fx.Graph]) -> None:
    report = on_gpus(forms.chain, static=static)
    assert [d.rewritten for d in report.decisions] == [True] * 3
    (table,) = {call.table for call in calls(graphs[-1])}
    assert {d.chosen.table for d in report.decisions} == {table_of(table)}
    assert table[-1].max_tokens == max_tokens
    (plan,) = report.plans
    assert plan.fabric is Fabric.PEER
    held, rows = sizes(plan), RowFormat(forms.HIDDEN, "bfloat16", "bfloat16", 4)
    for row in table:
        assert all(num_bytes <= held[name] for name, num_bytes in needed(rows, [row]).items())
    assert [call.max_tokens for call in calls(graphs[-1])] == [max_tokens] * 3
    assert [out for _, out in sharded(graphs[-1])] == [True, True, False]
    assert [(c.residual_sharded, c.sum_out.value) for c in calls(graphs[-1])] == [
        (False, "sharded"),
        (True, "sharded"),
        (True, "none"),
    ]
    words = {(c.partial_offset, c.output_offset, c.one_shot_max_tokens) for c in calls(graphs[-1])}
    assert words == {(0, 0, 0)}, "the runtime places what lives as long as the arena"


def test_wide_rows_have_room(graphs: list[fx.Graph]) -> None:
    """Weights in fp32 make the normalized rows fp32."""
    report = on_gpus(forms.fp32_weight, force=FORCED)
    (decision,), (plan,) = report.decisions, report.plans
    assert dict(decision.site.facts)["out_dtype"] == "float32"
    (call,) = calls(graphs[-1])
    assert call.out_dtype == "float32"
    assert sizes(plan) == needed(RowFormat(forms.HIDDEN, "bfloat16", "float32", 4), call.table)


def with_kernels(*curves: Curve, library_us: float | None = None) -> Machine:
    """h200x4 with these kernels on peer; `library_us`: an all-reduce of any size."""
    every = []
    for costs in H200.fabric_costs:
        if costs.fabric is Fabric.PEER:
            costs = replace(costs, curves=curves)
        elif library_us is not None:
            points = (Point(1, library_us), Point(1 << 40, library_us))
            costs = replace(costs, curves=(Curve("nccl", "all_reduce", "library", 4, points),))
        every.append(costs)
    return replace(H200, fabric_costs=tuple(every))


def kernel(algorithm: Algorithm, form: Transfer, *points: tuple[int, float], ctas: int = 0) -> Curve:
    curve = tuple(Point(*point) for point in points)
    last_bytes = curve[-1].bytes if form is Transfer.LL_PACKET else None
    return Curve("fused", "all_reduce_norm", variant_name(algorithm, form, ctas), 4, curve, last_bytes=last_bytes)


ROW = 16384
KERNELS = (
    kernel(Algorithm.ONE_SHOT, Transfer.LL_PACKET, (ROW, 5.0), (64 * ROW, 15.0)),
    kernel(Algorithm.TWO_SHOT, Transfer.LL_PACKET, (ROW, 7.0), (64 * ROW, 9.0), (512 * ROW, 40.0)),
    kernel(Algorithm.TWO_SHOT, Transfer.BULK, (ROW, 12.0), (512 * ROW, 45.0), (8192 * ROW, 640.0), ctas=64),
    kernel(Algorithm.TWO_SHOT, Transfer.BULK, (ROW, 11.0), (512 * ROW, 50.0), (8192 * ROW, 700.0), ctas=16),
)


Offered = dict[tuple[Fabric, str], Candidate]
"""Candidates of one site, by fabric and kernel variant."""


def facts_of(hidden: int, world: int, hosts: int = 1) -> ReductionFacts:
    return ReductionFacts("0", world, hosts, hidden, "bfloat16")


def offered(
    tokens: int,
    machine: Machine,
    *,
    max_tokens: int = 0,
    hidden: int = 8192,
    world: int = 4,
    force: bool = False,
    known: topology.Topology | None = None,
    usable_only: bool = False,
) -> Offered:
    terms = FusedReductionTerms(
        "all_reduce_rms_norm", False, known or topology.fake(world, device="cuda"), machine, against_library=not force
    )
    hosts = terms.topology.num_hosts
    counts = TokenCounts(tokens, most=max_tokens)
    found = candidates(facts_of(hidden, world, hosts), counts, terms, usable_only)
    return {(candidate.fabric, candidate.variant): candidate for candidate, _ in found}


def codes(candidate: Candidate) -> list[str]:
    return [rejection.code for rejection in candidate.rejections]


ONE_MAIL = (Fabric.PEER, "one_shot ll_packet")
TWO_MAIL = (Fabric.PEER, "two_shot ll_packet")
TWO_BULK = (Fabric.PEER, "two_shot bulk")


@pytest.mark.parametrize(
    ("tokens", "chosen"), [(1, ONE_MAIL), (100, TWO_MAIL), (512, TWO_MAIL), (513, TWO_BULK), (4096, TWO_BULK)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_candidate_at_the_hint_is_the_tables_row(tokens: int, chosen: object, dynamic: bool) -> None:
    found = offered(tokens, with_kernels(*KERNELS), max_tokens=8192 if dynamic else 0)
    allowed = [key for key, candidate in found.items() if candidate.allowed]
    assert isinstance(chosen, tuple)
    # Others read the sum, so a two-shot kernel may hand it out alone as well.
    apart = (chosen[0], f"{chosen[1]}, norm apart")
    assert allowed == ([chosen, apart] if chosen[1].startswith("two_shot") else [chosen])
    for key in (ONE_MAIL, TWO_MAIL, TWO_BULK):
        candidate = found[key]
        assert candidate.table == found[TWO_BULK].table != ()
        beyond = (key == ONE_MAIL and tokens > 64) or (key == TWO_MAIL and tokens > 512)
        expected = [] if key == chosen else ["beyond_measured", "slower_algorithm"] if beyond else ["slower_algorithm"]
        assert codes(candidate) == expected
        assert (candidate.estimate is None) is beyond
    best = next(c for c in found.values() if c.allowed)
    row = next(row for row in best.table if tokens <= row.max_tokens)
    num_ctas = dict(row.values).get("num_ctas", 0)
    assert (dict(best.parameters)["num_ctas"], best.variant) == (num_ctas, row.variant)
    algorithm, form = row.variant.split()
    kernel_us = estimate_fused(
        with_kernels(*KERNELS),
        Workload(tokens, tokens, 8192, "bfloat16", 4),
        Fabric.PEER,
        Algorithm(algorithm),
        sum_sharded=False,
        transfer=Transfer(form),
        num_ctas=int(num_ctas),
    )
    host = Estimate((Term("host", cost_model.host_us(H200)),))
    assert best.estimate is not None and best.estimate == kernel_us.plus(host), "and what the host takes for one call"


def test_usable_ones_are_the_same_in_the_same_order() -> None:
    for tokens, machine in ((64, with_kernels(*KERNELS)), (4096, H200), (64, cost_model.load("h100x8"))):
        for force in (False, True):
            every = [c for c in offered(tokens, machine, force=force).values() if c.allowed]
            assert list(offered(tokens, machine, force=force, usable_only=True).values()) == every
        assert every


def test_the_library_is_faster_at_every_size_or_above_one() -> None:
    never = offered(64, with_kernels(*KERNELS, library_us=0.1))
    assert all("library_faster" in codes(never[key]) for key in (ONE_MAIL, TWO_MAIL, TWO_BULK))
    forced = offered(64, with_kernels(*KERNELS, library_us=0.1), force=True)
    assert forced[TWO_MAIL].allowed
    above = offered(4096, with_kernels(*KERNELS, library_us=60.0), max_tokens=8192)
    (reason,) = above[TWO_BULK].rejections
    assert reason.code == "library_faster"
    assert dict(reason.values)["table_ends_at"] == above[TWO_BULK].table[-1].max_tokens < 4096


def test_rows_and_worlds_that_the_kernels_do_not_take() -> None:
    assert "row_not_supported" in codes(offered(4, H200, hidden=8190)[TWO_BULK])
    assert "world_not_supported" in codes(offered(4, H200, world=9)[TWO_BULK])
    assert not {"row_not_supported", "world_not_supported"} & set(codes(offered(4, H200, hidden=8184)[TWO_BULK]))


def test_other_fabrics_say_why_not() -> None:
    found = offered(64, H200)
    for key, candidate in found.items():
        if key[0] is not Fabric.PEER:
            # Memory of the host is for ranks without peer access, whatever the profile has.
            assert ("better_fabric" if key[0] is Fabric.HOST else "fabric_not_on_machine") in codes(candidate)
    assert not any("no_kernel" in codes(candidate) for candidate in found.values())
    within_a_host = {Fabric.PEER, Fabric.MULTIMEM, Fabric.HOST, Fabric.SHM}
    assert {key[0] for key in found} == within_a_host


def test_between_hosts_it_stays_away() -> None:
    found = offered(64, H200, known=topology.fake(4, hosts=2, device="cuda")).values()
    assert not any(candidate.allowed for candidate in found)
    assert all("fabric_needs_one_host" in codes(c) for c in found if c.fabric is Fabric.PEER)


def test_multimem_is_kept_where_the_profile_has_it_and_called_unmeasured(
    graphs: list[fx.Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dgx = cost_model.load("h100x8")
    no_peer = replace(dgx, fabric_costs=tuple(c for c in dgx.fabric_costs if c.fabric is not Fabric.PEER))
    (tmp_path / "dgx.json").write_text(cost_model.dumps(no_peer))
    report = on_gpus(forms.chain, machine=str(tmp_path / "dgx.json"), world=8, force=FORCED)
    chosen = report.decisions[0].chosen
    assert chosen.fabric is Fabric.MULTIMEM and dict(chosen.parameters)["measured"] is False
    assert {row.variant.split()[-1] for row in chosen.table} == {"direct"}
    # There the product writes into the arena.
    assert "weave.mm_all_reduce_norm.default" in targets(graphs[-1])
    (plan,) = report.plans
    assert sizes(plan)["partial"] > 0
    monkeypatch.setattr(traits, "is_built", lambda part: True)
    real = replace(topology.fake(8, device="cuda"), fake=False)
    assert codes(offered(64, cost_model.load("h100x8"), world=8, known=real)[MULTIMEM]) == codes(
        offered(64, cost_model.load("h100x8"), world=8)[MULTIMEM]
    ), "a candidate under the profile's prices, where torch makes mappings"
    off = replace(real, no_multicast=Rejection("no_multicast", "torch makes none"))
    assert "no_multicast" in codes(offered(64, cost_model.load("h100x8"), world=8, known=off)[MULTIMEM])
