"""Attention, and many GEMMs in one kernel: known figures, and what must hold for any machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weaveopt import cost_model
from weaveopt.cost_model import Attention, attention_us
from weaveopt.cost_model.batched import (
    batched_gemm_us,
    grouped_gemm_us,
    grouped_slowdown,
    num_active_experts,
    same_work,
)
from weaveopt.cost_model.compiled import CompiledCosts, SizedSlowdowns, Slowdown
from weaveopt.cost_model.gemm import Gemm, gemm_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.mixture import Mixture, gemms_us, kernels_us

MACHINES = {name: cost_model.load(name) for name in cost_model.names()}
PREFILL = Attention(1, 8, 8, 2048, 2048, 64, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "batch", "q_len", "kv_len", "measured_us"),
    [
        ("bfloat16", 1, 512, 512, 6818),
        ("bfloat16", 1, 2048, 2048, 105062),
        ("bfloat16", 1, 1, 256, 157),
        ("bfloat16", 8, 1, 256, 1254),
        ("float32", 1, 512, 512, 6414),
        ("float32", 1, 2048, 2048, 105602),
        ("float32", 8, 1, 2048, 4286),
    ],
)
def test_cpu_attention_as_measured(dtype: str, batch: int, q_len: int, kv_len: int, measured_us: float) -> None:
    """Eight heads of 64 elements with a mask, one thread."""
    attention = Attention(batch, 8, 8, q_len, kv_len, 64, dtype, mask_bytes=2 * batch * q_len * kv_len)
    assert attention_us(MACHINES["cpu"], attention) == pytest.approx(measured_us, rel=0.2)


def test_flops_of_what_a_causal_mask_leaves() -> None:
    """Query i of n sees i + 1 keys; of the last queries over a longer cache, all before them as well."""
    visible = {(4, 4): 10, (1, 4): 4, (2, 4): 7, (4, 2): 3}
    for (q_len, kv_len), scores in visible.items():
        causal = Attention(1, 1, 1, q_len, kv_len, 1, "float32", causal=True)
        assert causal.flops == 4.0 * scores
        assert replace(causal, causal=False).flops == 4.0 * q_len * kv_len


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_attention_on_any_machine(machine: Machine) -> None:
    assert attention_us(machine, replace(PREFILL, batch=0)) == 0.0
    times = [attention_us(machine, replace(PREFILL, kv_len=1 << n)) for n in range(4, 16)]
    assert times[0] > 0.0 and all(a <= b for a, b in pairwise(times)) and times[-1] > 20 * times[0]
    long = replace(PREFILL, q_len=16384, kv_len=16384)
    ratio = attention_us(machine, replace(long, causal=True)) / attention_us(machine, long)
    if machine.attention is None:
        assert ratio == pytest.approx(0.5, abs=0.01)
    else:  # what was measured: the kernel that knows the mask may be another one
        assert ratio == pytest.approx(machine.attention.causal_step_us / machine.attention.step_us, rel=0.01)
    assert attention_us(machine, replace(long, mask_bytes=2 * 16384**2)) >= attention_us(machine, long)


@pytest.mark.parametrize("name", ["h200x4", "h100x8", "a100x4-slingshot"])
def test_decode_reads_keys_and_values(name: str) -> None:
    """64 sequences of 2048 positions: grouped heads read an eighth of what repeated ones do."""
    machine = MACHINES[name]
    repeated = Attention(64, 16, 16, 1, 2048, 128, "bfloat16")
    grouped = replace(repeated, kv_heads=2)
    assert repeated.num_bytes == pytest.approx(2 * 64 * 16 * 2048 * 128 * 2, rel=0.01)
    bytes_per_s = machine.memory.bytes_per_s if machine.attention is None else machine.attention.bytes_per_s
    # A measured curve goes a little beyond the one bandwidth that stands for all sizes.
    assert attention_us(machine, repeated) > 0.95 * repeated.num_bytes / bytes_per_s * 1e6
    assert attention_us(machine, repeated) == pytest.approx(8 * attention_us(machine, grouped), rel=0.2)


def test_experts_that_rows_meet() -> None:
    assert [num_active_experts(8, rows) for rows in (1, 2, 16, 4096)] == [1, 2, 7, 8]
    assert num_active_experts(1, 5) == 1 and num_active_experts(128, 8) == 8


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_many_gemms_in_one_kernel(machine: Machine) -> None:
    one = Gemm(2048, 4096, 4096)
    assert batched_gemm_us(machine, 1, one, "bfloat16") == cost_model.gemm_us(machine, one, "bfloat16")
    assert batched_gemm_us(machine, 0, one, "bfloat16") == 0.0
    eight = batched_gemm_us(machine, 8, one, "bfloat16")
    assert eight == pytest.approx(8 * cost_model.gemm_us(machine, one, "bfloat16"), rel=0.2), "waves fill better"
    # Few rows: what is read is the weights of the experts that they meet.
    few, more = (grouped_gemm_us(machine, 64, Gemm(rows, 4096, 4096), "bfloat16") for rows in (2, 16))
    assert 5.0 * few < more < 9.0 * few
    assert grouped_gemm_us(machine, 64, Gemm(0, 4096, 4096), "bfloat16") == 0.0


def test_a_grouped_gemm_is_slowed_by_the_rows_of_an_expert() -> None:
    machine = MACHINES["h200x4"]
    points = (Slowdown(2, 2.0), Slowdown(32, 1.2), Slowdown(128, 1.0))
    costs = CompiledCosts("memory", grouped=(SizedSlowdowns(1, (Slowdown(1, 1.5),)),))
    assert [grouped_slowdown(costs, rows, 1 << 20) for rows in (1, 1000)] == [1.5, 1.5]
    costs = replace(costs, grouped=(SizedSlowdowns(1, points),))
    found = [grouped_slowdown(costs, rows, 1 << 20) for rows in (0.5, 2, 8, 32, 64, 128, 4096)]
    assert found == pytest.approx([2.0, 2.0, 1.6, 1.2, 1.1, 1.0, 1.0])
    routed = replace(machine, compiled=costs)
    gemm = Gemm(8 * 64, 4096, 4096)
    assert grouped_gemm_us(routed, 8, gemm, "bfloat16") == gemm_us(machine, same_work(8, gemm), "bfloat16") * 1.1


def test_many_small_experts_are_slowed_otherwise_than_few_large_ones() -> None:
    small, large = (Slowdown(2, 2.0), Slowdown(8, 1.6)), (Slowdown(2, 1.2),)
    sizes = (SizedSlowdowns(1 << 20, small), SizedSlowdowns(1 << 24, large))
    costs = CompiledCosts("memory", grouped=sizes)
    found = [grouped_slowdown(costs, 4, elements) for elements in (1, 1 << 20, 1 << 22, 1 << 24, 1 << 30)]
    assert found == pytest.approx([1.8, 1.8, 1.5, 1.2, 1.2])
    machine = replace(MACHINES["h200x4"], compiled=costs)
    gemm = Gemm(128 * 4, 1024, 1024)
    active = num_active_experts(128, gemm.m)
    priced = grouped_gemm_us(machine, 128, gemm, "bfloat16") / gemm_us(machine, same_work(active, gemm), "bfloat16")
    assert priced == pytest.approx(grouped_slowdown(costs, gemm.m / active, 1 << 20))


def test_a_mixture_of_thousands_of_rows_an_expert_is_not_rewritten_for_nothing() -> None:
    """As measured: 8192 tokens of Mixtral-8x22B took 60.1 ms with transformers' grouped GEMMs, 62.5 rewritten."""
    mixture = Mixture(8192, 2, 8, 6144, 16384, True, "bfloat16")
    ours = kernels_us(MACHINES["h200x4"], mixture, "hopper")
    assert ours is not None and 0.9 < gemms_us(MACHINES["h200x4"], mixture) / ours < 0.98


def test_only_cpu_kernels_wait_for_the_host() -> None:
    assert {name for name, machine in MACHINES.items() if cost_model.host_us(machine) > 0.0} == {"cpu"}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_what_compiled_graphs_take_beyond_is_the_machines(machine: Machine) -> None:
    gemm = Gemm(4096, 4096, 1792)
    bare = replace(machine, name="bare", compiled=None)
    one = cost_model.gemm_us(machine, same_work(8, gemm), "bfloat16")
    assert cost_model.grouped_gemm_us(bare, 8, gemm, "bfloat16") == one and cost_model.host_us(bare) == 0.0
    other = replace(
        machine, name="other", compiled=CompiledCosts("memory", 7.0, (SizedSlowdowns(1, (Slowdown(1, 1.5),)),))
    )
    assert cost_model.grouped_gemm_us(other, 8, gemm, "bfloat16") == 1.5 * one
    assert cost_model.host_us(other) == 7.0
