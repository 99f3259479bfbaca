"""The kernels' names in profiles, and which of them a fabric's devices can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.collectives import fabric_costs
from weaveopt.cost_model.machine import TRANSFERS, Curve, Point
from weaveopt.errors import ProfileError
from weaveopt.ops.reduction.prices.kernels import kernel_variants, usable_transfers
from weaveopt.ops.reduction.variant import ALGORITHMS, BETWEEN_GPUS, Transfer, parse_variant, variant_name
from weaveopt.records.candidate import Fabric

H200 = cost_model.load("h200x4")
BETWEEN_HOSTS = {Transfer.MESSAGE, *BETWEEN_GPUS}


def test_every_kernel_is_known_by_its_name() -> None:
    within_host = {transfer.value for transfer in ALGORITHMS.keys() - BETWEEN_HOSTS}
    assert within_host == TRANSFERS, "the words that profiles may use"
    assert set(Transfer) - ALGORITHMS.keys() == {Transfer.TILES}, "the kernel of another operation"
    names = set()
    for transfer, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            for num_ctas in (0, 8, 132):
                name = variant_name(algorithm, transfer, num_ctas)
                assert parse_variant(name) == (algorithm, transfer, num_ctas)
                names.add(name)
    assert len(names) == 3 * 13 and {"one_shot ll_packet", "two_shot bulk ctas=8"} <= names


@pytest.mark.parametrize(
    "name",
    ["", "library", "one_shot bulk", "two_shot", "two_shot bulk ctas=", "two_shot bulk ctas=x", "two_shot bulk 8"],
)
def test_what_is_no_kernel_is_refused_by_name(name: str) -> None:
    with pytest.raises(ProfileError, match="all_reduce_norm: found variant") as caught:
        parse_variant(name)
    assert repr(name) in str(caught.value) and "two_shot bulk, " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_shipped_curve_is_of_a_kernel() -> None:
    seen = set()
    for name in cost_model.names():
        for costs in cost_model.load(name).fabric_costs:
            seen.update(parse_variant(curve.variant)[1] for curve in costs.curves_of("all_reduce_norm"))
    assert seen == ALGORITHMS.keys() - BETWEEN_HOSTS, "what travels between hosts is priced, or not timed yet"


def test_transfers_of_a_fabric_that_does_not_tell() -> None:
    machine = cost_model.load("h100x8")
    found = {each.fabric: usable_transfers(each) for each in machine.fabric_costs}
    assert found == {
        Fabric.LIBRARY: (),
        Fabric.MULTIMEM: (Transfer.DIRECT,),
        Fabric.PEER: (Transfer.LL_PACKET, Transfer.BULK),
    }
    older = fabric_costs(cost_model.load("a800x4"), Fabric.PEER)
    assert usable_transfers(older) == (Transfer.LL_PACKET,), "bulk copies need sm_90"
    assert usable_transfers(replace(older, transfers=("carrier_pigeon",))) == ()


def test_a_curve_of_an_unknown_kernel_is_no_silence() -> None:
    odd = Curve("fused", "all_reduce_norm", "two_shot blk", 4, (Point(1024, 5.0),))
    costs = tuple(
        replace(each, curves=(*each.curves, odd)) if each.fabric is Fabric.PEER else each for each in H200.fabric_costs
    )
    with pytest.raises(ProfileError, match="two_shot blk"):
        kernel_variants(replace(H200, name="odd", fabric_costs=costs), Fabric.PEER, 4096, 4)
