"""Which shipped profile GPUs get, whoever asks, and for which of them it only stands in."""

from __future__ import annotations

import itertools

import pytest

from weaveopt.cost_model import Gpu, choose, load

H200 = Gpu("NVIDIA H200", 132, 4.8e12)
L40S = Gpu("NVIDIA L40S", 142, 0.864e12)


@pytest.mark.parametrize(
    ("name", "ranks", "profile"),
    [
        ("NVIDIA H200", 2, "h200x4"),
        ("NVIDIA H200", 8, "h200x8"),
        ("NVIDIA H100 80GB HBM3", 2, "h100x2"),
        ("NVIDIA H100 80GB HBM3", 4, "h100x8"),  # two tell nothing of four
        ("NVIDIA H200", 16, "h200x8"),
        ("NVIDIA A100-SXM4-80GB", 4, "a100x4-slingshot"),
        ("NVIDIA B200", 8, "b200x8"),
        ("NVIDIA GB200", 4, "gb200-nvl72"),
        ("NVIDIA GH200 480GB", 1, "gh200-infiniband"),
    ],
)
def test_a_gpu_with_a_profile_gets_it(name: str, ranks: int, profile: str) -> None:
    choice = choose([Gpu(name)] * ranks, ranks)
    assert (choice.machine.name, choice.stands_in_for) == (profile, ())


@pytest.mark.parametrize(
    ("name", "ranks", "profile"),
    [
        ("NVIDIA H200", 2, "h200x2-no-peer"),
        ("NVIDIA H200", 4, "h200x2-no-peer"),  # more ranks than it was measured with are refused at each site
        ("NVIDIA H100 80GB HBM3", 2, "h100x2-no-peer"),
        ("NVIDIA B200", 2, "b200x8"),  # whose library's times are those of NVLink: the only ones
    ],
)
def test_without_peer_access_the_profile_of_such_gpus_comes_first(name: str, ranks: int, profile: str) -> None:
    assert choose([Gpu(name)] * ranks, ranks, has_peer_access=False).machine.name == profile


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [
        (L40S, "a100x4-slingshot"),
        (Gpu("NVIDIA A10", 72, 0.6e12), "a100x4-slingshot"),
        (Gpu("NVIDIA GeForce RTX 4090", 128, 1.008e12), "a100x4-slingshot"),
        (Gpu("NVIDIA B300 SXM6 AC", 148, 8e12), "b200x8"),
        (Gpu("NVIDIA RTX A1000", 20, 0.192e12), "a100x4-slingshot"),  # no A100
        (Gpu("NVIDIA H100 PCIe", 114, 2.04e12), "h100x2"),  # no NVSwitch
        (Gpu("NVIDIA H200 MIG 1g.18gb", 16, 0.6e12), "a100x4-slingshot"),  # a seventh of one
    ],
)
def test_any_other_gets_the_nearest_as_a_stand_in(gpu: Gpu, profile: str) -> None:
    choice = choose([gpu, gpu], 4)
    assert (choice.machine.name, choice.stands_in_for) == (profile, (gpu.name,))


def test_assumed_contention_is_for_whoever_names_the_profile() -> None:
    """Measured contention stays; a profile with the library alone is nobody's own."""
    assert load("a100x4-slingshot").contention is not None
    assert choose([Gpu("NVIDIA A100-SXM4-80GB")] * 4, 4).machine.contention is None
    assert choose([H200] * 2, 4).machine.contention is not None
    assert choose([L40S] * 4, 4, has_peer_access=False).machine.name not in ("l40sx4", "l40sx8")


def test_a_gpu_that_says_nothing_of_itself_gets_some_profile() -> None:
    assert choose([Gpu("")], 4).stands_in_for == ("",)
    assert choose([Gpu("NVIDIA B300", 148)], 8).machine.name == "b200x8", "by processors where bandwidth is not known"


def test_all_ranks_choose_the_same_where_their_gpus_differ() -> None:
    ranks = [H200, L40S, Gpu("NVIDIA H100 80GB HBM3", 132, 3.35e12), H200]
    found = {choose(order, 4).machine.name for order in itertools.permutations(ranks)}
    assert found == {"a100x4-slingshot"}, "the slowest one's"
    named = {choose(order, 4).stands_in_for for order in itertools.permutations(ranks)}
    assert named == {("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S")}
