"""The rule through memory of the host: where no GPU reaches its peers, under a profile with its times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.fx as fx

from tests.graphs import forms
from tests.graphs.calls import calls, needed, sizes
from tests.graphs.preview import FORCED, fake_group
from tests.rewrites.test_all_reduce_rms_norm import inputs
from tests.rewrites.test_all_reduce_rms_norm_peer import H200, ROW, Offered, codes, kernel, offered
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model.machine import Curve, FabricCosts, Link, Machine, Point
from weaveopt.fabrics import topology
from weaveopt.ops.reduction.buffers import RowFormat
from weaveopt.ops.reduction.variant import Algorithm, Transfer
from weaveopt.preview import preview
from weaveopt.records.candidate import Fabric, Rejection
from weaveopt.records.report import GraphReport

KERNELS = (
    kernel(Algorithm.ONE_SHOT, Transfer.LL_PACKET, (ROW, 6.0), (64 * ROW, 60.0)),
    kernel(Algorithm.TWO_SHOT, Transfer.POSTED, (ROW, 20.0), (64 * ROW, 45.0), (4096 * ROW, 2000.0), ctas=32),
)
RESTRICTED = topology.fake(4, device="cuda").restricted(["host"])
APART = replace(topology.fake(4, device="cuda"), no_peer_access=(0, 1))


def on_host(*curves: Curve, library_us: float = 400.0) -> Machine:
    """h200x4 as if NCCL went through memory of the host, with these kernels on `host`."""
    points = (Point(1, 20.0), Point(64 * ROW, library_us), Point(8192 * ROW, 40000.0))
    library = FabricCosts(
        Fabric.LIBRARY, Link("fused", 10.0, 28e9), (Curve("fused", "all_reduce", "library", 4, points),)
    )
    peer = next(costs for costs in H200.fabric_costs if costs.fabric is Fabric.PEER)
    through_host = FabricCosts(Fabric.HOST, Link("fused", 3.0, 25e9), curves)
    return replace(H200, name="no-peer", fabric_costs=(through_host, library, peer))


MEASURED = on_host(*KERNELS)


def of_host(found: Offered) -> dict[str, list[str]]:
    return {variant: codes(each) for (fabric, variant), each in found.items() if fabric is Fabric.HOST}


NO_PEER = ("h100x2-no-peer", "h200x2-no-peer")


@pytest.mark.parametrize("name", [name for name in cost_model.names() if name not in NO_PEER])
def test_no_profile_of_another_link_chooses_it(name: str) -> None:
    machine = cost_model.load(name)
    assert Fabric.HOST not in machine.fabrics
    for known in (APART, RESTRICTED):
        found = of_host(offered(1, machine, known=known))
        assert found and all("not_measured" in each for each in found.values())
        assert not of_host(offered(1, machine, known=known, usable_only=True))


@pytest.mark.parametrize("name", NO_PEER)
def test_the_profile_of_such_gpus_chooses_it(name: str) -> None:
    two = replace(topology.fake(2, device="cuda"), no_peer_access=(0, 1))
    found = of_host(offered(1, cost_model.load(name), known=two, usable_only=True))
    assert list(found) == ["one_shot ll_packet"]


def test_a_fabric_without_curves_is_not_measured_either() -> None:
    found = of_host(offered(1, on_host(), known=APART))
    assert found and all("not_measured" in each for each in found.values())


def test_peer_access_comes_first() -> None:
    found = of_host(offered(1, MEASURED))
    assert found and all(each[0] == "better_fabric" for each in found.values())
    assert not of_host(offered(1, MEASURED, usable_only=True))


def test_a_gpu_that_maps_no_memory_of_the_host_is_an_answer() -> None:
    refused = Rejection("no_host_memory", "a rank's GPU cannot", (("rank", 1),))
    found = of_host(offered(1, MEASURED, known=replace(APART, no_host_memory=refused)))
    assert found and all("no_host_memory" in each for each in found.values())


@pytest.mark.parametrize("known", [APART, RESTRICTED], ids=["no peer access", "restricted"])
@pytest.mark.parametrize(
    ("tokens", "chosen"), [(1, "one_shot ll_packet"), (8, "one_shot ll_packet"), (64, "two_shot posted")]
)
def test_the_fastest_kernel_serves_a_size(tokens: int, chosen: str, known: topology.Topology) -> None:
    found = offered(tokens, MEASURED, known=known)
    assert codes(found[Fabric.HOST, chosen]) == []
    fused = [variant for variant, why in of_host(found).items() if not why and "norm apart" not in variant]
    assert fused == [chosen]
    peers = [each for (fabric, _), each in found.items() if fabric is Fabric.PEER]
    assert peers and all({"no_peer_access", "fabric_excluded"} & set(codes(each)) for each in peers)


def test_the_library_keeps_what_it_does_better() -> None:
    slow = on_host(*KERNELS, library_us=30.0)
    found = of_host(offered(64, slow, known=APART))
    assert found and all("library_faster" in each for each in found.values())


def report_on(machine: Machine, *fabrics: str) -> GraphReport:
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    weights = forms.make_weights(torch.bfloat16)
    with fake_group(4), torch.no_grad():
        config = Config(force=FORCED, fabrics=fabrics)
        seen = preview(config, topology.fake(4, device="cuda"), machine, reports.append)
        compiled = torch.compile(lambda x, r: forms.chain(weights, x, r), backend=seen, fullgraph=True, dynamic=False)
        compiled(*inputs(torch.bfloat16))
    (report,) = reports
    return report


def test_a_chain_is_rewritten_and_its_arena_planned(graphs: list[fx.Graph]) -> None:
    report = report_on(MEASURED, "host", "library")
    assert report.fallbacks == ()
    assert {decision.chosen.fabric for decision in report.decisions} == {Fabric.HOST}
    found = calls(graphs[-1])
    assert len(found) == 3 and {call.fabric for call in found} == {Fabric.HOST}
    assert not any(call.normalized_aliases_arena for call in found), "a GEMM would read its rows over PCIe"
    (plan,) = report.plans
    assert plan.fabric is Fabric.HOST
    held, rows = sizes(plan), RowFormat(forms.HIDDEN, "bfloat16", "bfloat16", 4)
    for row in found[0].table:
        assert all(num_bytes <= held[name] for name, num_bytes in needed(rows, [row]).items())
