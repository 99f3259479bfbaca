"""Statements of the NVRAR paper, in words and tables, against our prices of the same all-reduces.

Figures that the paper only draws are not read off. Links between hosts under NCCL and NVSHMEM are fitted to these very
statements (the profiles' origins say so), each to two numbers: the tests hold that one pair of constants fits all.
"""

from __future__ import annotations

from itertools import product

import pytest

from weaveopt import cost_model
from weaveopt.cost_model.collectives import TREE, all_reduce_us, hierarchical_us, library_cost
from weaveopt.cost_model.host_schedules import RING
from weaveopt.cost_model.machine import Machine
from weaveopt.records.candidate import Fabric

KIB = 1024
WITHIN = 0.25
SLINGSHOT, INFINIBAND = "a100x4-slingshot", "gh200-infiniband"
HOSTS = (2, 4, 8, 16, 32)
"""8 to 128 GPUs of Perlmutter, 2 to 32 of Vista."""


def _speedup(machine: Machine, kib: int, hosts: int, back_to_back: bool = True) -> float:
    """NCCL's better algorithm over NVRAR. The microbenchmark calls it back to back (§5)."""
    world = machine.ranks_per_host * hosts
    library_us = all_reduce_us(machine, Fabric.LIBRARY, "library", kib * KIB, world, hosts)
    return library_us / hierarchical_us(machine, kib * KIB, world, hosts, back_to_back)


def _about(stated: float) -> object:
    return pytest.approx(stated, rel=WITHIN)


@pytest.mark.parametrize(
    ("name", "sizes", "least", "most"),
    [
        # §5.1: "Between 256 KB and 1 MB, NVRAR achieves significant speedups over NCCL (1.06×–1.92×)." (Perlmutter)
        (SLINGSHOT, (256, 512, 1024), 1.06, 1.92),
        # §7: "NVRAR achieves 1.06×–1.92× lower latency on Slingshot and 1.14×–3.57× on InfiniBand for 256 KB–2 MB".
        (SLINGSHOT, (256, 512, 1024, 2048), 1.06, 1.92),
        (INFINIBAND, (256, 512, 1024, 2048), 1.14, 3.57),
        # §5.1: "Between 256 KB and 1 MB, NVRAR can achieve up to 3.5× lower latency than NCCL." (Vista)
        (INFINIBAND, (256, 512, 1024), 1.14, 3.5),
    ],
)
def test_range_of_speedups(name: str, sizes: tuple[int, ...], least: float, most: float) -> None:
    machine = cost_model.load(name)
    found = [_speedup(machine, kib, hosts) for kib, hosts in product(sizes, HOSTS)]
    assert min(found) == _about(least)
    assert max(found) == _about(most)


def test_small_messages_on_infiniband() -> None:
    """§5.1: "Beyond four GPUs, for 64 KB and 128 KB messages, NVRAR outperforms NCCL by 1.08×–1.70×." (Vista)"""
    found = [_speedup(cost_model.load(INFINIBAND), kib, hosts) for kib, hosts in product((64, 128), (8, 16, 32))]
    assert min(found) == _about(1.08) and max(found) == _about(1.70)
    assert min(found) > 1


@pytest.mark.parametrize("hosts", HOSTS)
def test_small_messages_back_to_back_are_slower_on_slingshot(hosts: int) -> None:
    """§5.1: "On Perlmutter (middle), NVRAR is slower than NCCL for 64 KB and 128 KB messages, partly due to kernel
    launch overheads from its three-phase design." """
    machine = cost_model.load(SLINGSHOT)
    assert _speedup(machine, 64, hosts) < 1 and _speedup(machine, 128, hosts) < 1


def test_with_computation_between_it_is_ahead_at_128_kb() -> None:
    """§5.2.1: 1.3× in the model on 32 GPUs at 128 KB, "where our standalone microbenchmark reports slowdowns [...]
    deferred peer synchronization triggers immediately at the start of the next all-reduce, without any computation to
    hide it". Appendix B, Figure 13: the same on 16 GPUs. The all-reduce saves at least what the model does."""
    machine = cost_model.load(SLINGSHOT)
    for hosts in (4, 8):
        assert _speedup(machine, 128, hosts, back_to_back=True) < 1 < _speedup(machine, 128, hosts, back_to_back=False)
    assert _speedup(machine, 128, 8, back_to_back=False) >= 1.3 * (1 - WITHIN)


@pytest.mark.parametrize(
    ("name", "kib", "hosts", "in_the_model"),
    [
        # §5.2.1: "For #P=32 on 32 GPUs (message size 512 KB), NVRAR-based TP achieves a 1.86× speedup".
        (SLINGSHOT, 512, 8, 1.86),
        # Appendix C.4.1: "for the 70B model, NVRAR achieves a speedup of 1.92× for NumPrompts=32 on 16 GPUs" (Vista);
        # 32 prompts of 8192 elements are 512 KB.
        (INFINIBAND, 512, 16, 1.92),
    ],
)
def test_the_all_reduce_saves_what_the_model_does(name: str, kib: int, hosts: int, in_the_model: float) -> None:
    assert _speedup(cost_model.load(name), kib, hosts, back_to_back=False) >= in_the_model * (1 - WITHIN)


def test_time_of_one_all_reduce() -> None:
    """Table 5: NVRAR, 1024 KB on 16 GPUs, best of four configurations: 0.1522 ms."""
    assert hierarchical_us(cost_model.load(SLINGSHOT), 1024 * KIB, 16, 4, back_to_back=True) == _about(152.2)


@pytest.mark.parametrize("name", [SLINGSHOT, INFINIBAND])
def test_order_of_the_algorithms(name: str) -> None:
    """§4.3: NVRAR "matches the logarithmic scaling of Tree all-reduce", "whereas Ring all-reduce scales linearly";
    §5.1: "For 1024 KB messages on Perlmutter, NCCL selects the Tree algorithm (LL protocol) at all GPU counts".
    §1: NVRAR ahead "in the 256 KB to 2 MB message size range"; NCCL never picks the ring there beyond two hosts here.
    """
    machine = cost_model.load(name)
    for kib, hosts in product((256, 512, 1024, 2048), HOSTS):
        world = machine.ranks_per_host * hosts
        algorithm, library = library_cost(machine, kib * KIB, world, hosts)
        assert algorithm == TREE or (world == 2 and algorithm == RING), "of two ranks both are the same"
        assert hierarchical_us(machine, kib * KIB, world, hosts) < machine.memory.floor_us + library.us


def test_the_report_names_the_algorithm() -> None:
    """The library's algorithm whose price a collective between hosts has."""
    machine = cost_model.load(SLINGSHOT)
    assert cost_model.library_algorithm(machine, "all_reduce", 1 << 20, 64, 16) == TREE
    assert cost_model.library_algorithm(machine, "all_gather", 1 << 20, 64, 16) == RING
    assert cost_model.library_algorithm(machine, "all_reduce", 1 << 20, 4, 1) == ""
