"""Both native GEMMs of `moe_experts` in one kernel on Hopper: the bits of two kernels, whatever waits for what.

Shapes, activations and replayed graphs are tried with it in `test_moe_experts_hopper_gpu.py`, too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.captured import captured
from tests.gpu.test_moe_experts_hopper_gpu import (
    CLAMPED,
    GPT_OSS,
    MIXTRAL,
    PLAIN,
    QWEN,
    SILU,
    check,
    launch,
    launch_one,
    pytestmark,  # noqa: F401  (marks of this file too)
)
from tests.graphs.experts_cases import ROUTINGS, Sizes, make_experts, make_operands, poisoned
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.plan import TRITON_ROUTING_ROWS
from weaveopt.ops.experts.reference import reference

MODELS = ((QWEN, SILU), (MIXTRAL, SILU), (GPT_OSS, CLAMPED))
CALLS_IN_A_ROW = 20


@pytest.mark.parametrize("routing", ["uniform", "skewed", "one_expert", "some_foreign", "all_foreign"])
@pytest.mark.parametrize("tokens", [1, 8, 100, 600])
def test_the_bits_of_two_kernels(tokens: int, routing: str) -> None:
    """With every lag: with none, an item that is waited for was taken just before."""
    for sizes, call in MODELS:
        operands = make_operands(replace(sizes, tokens=tokens), call, torch.bfloat16, tokens, routing, "cuda")
        want = launch(operands, call)
        assert_close(want, reference(operands, call), KERNEL, f"{sizes} {tokens} {routing}")
        for lag, group in ((0, 1), (0, 8), (1, 1), (2, 4), (100, 1)):
            got = launch_one(poisoned(operands), call, group, lag)
            assert torch.equal(got, want), f"{sizes} {tokens} {routing}, lag {lag}, group {group}"


@pytest.mark.parametrize("rows", [TRITON_ROUTING_ROWS // 8, TRITON_ROUTING_ROWS])
def test_calls_in_a_row(rows: int) -> None:
    """Each one counts from zero, whichever kernel routes; nothing waits for the device between them."""
    sizes = replace(QWEN, tokens=rows)
    assert (sizes.tokens * sizes.choices > TRITON_ROUTING_ROWS) is (rows == TRITON_ROUTING_ROWS)
    many = [make_operands(sizes, SILU, torch.bfloat16, seed, ROUTINGS[seed % 2], "cuda") for seed in range(4)]
    assert gpu.has_native_routing(many[0].x.device)
    want = [launch(operands, SILU) for operands in many]
    got = [launch_one(many[at % 4], SILU, lag=at % 3) for at in range(CALLS_IN_A_ROW)]
    assert all(torch.equal(each, want[at % 4]) for at, each in enumerate(got))


def test_a_graph_of_several_calls() -> None:
    sizes = replace(QWEN, tokens=300)
    operands = make_operands(sizes, SILU, torch.bfloat16, 0, "uniform", "cuda")
    graph, got = captured(lambda: [launch_one(operands, SILU, lag=lag) for lag in (0, 1, 2)])
    generator = torch.Generator().manual_seed(1)
    for routing in (*ROUTINGS, "uniform") * 3:
        operands.experts.copy_(make_experts(routing, sizes, generator))
        operands.x.normal_()
        for _ in range(3):
            graph.replay()
        want = launch(operands, SILU)
        assert all(torch.equal(each, want) for each in some(got)), routing


def test_clusters_that_find_no_room() -> None:
    """On several streams at once: their clusters begin when others' have ended, and none waits for one of those."""
    operands = [
        make_operands(replace(QWEN, tokens=tokens), SILU, torch.bfloat16, tokens, "uniform", "cuda")
        for tokens in (64, 300, 1000, 2000)
    ]
    want = [launch(each, SILU) for each in operands]
    streams = [torch.cuda.Stream() for _ in operands]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for each, stream in zip(operands, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(launch_one(each, SILU, lag=0))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("call", [SILU, PLAIN, CLAMPED], ids=["gated", "plain", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes_that_fill_no_tile(call: ExpertsCall, transposed: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for hidden, inner in ((8, 8), (72, 40), (264, 1032), (1024, 520)):
            sizes = Sizes(333, 3, 5, hidden, inner, bias=True, transposed=transposed)
            check(make_operands(sizes, call, dtype, hidden, "some_foreign", "cuda"), call, f"{sizes} {dtype}")


def test_every_width_of_a_multiply() -> None:
    """Instructions 8 to 144 rows wide in each CTA, in both GEMMs."""
    counts = (*range(1, 289, 5), 288, 0, 289)
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=1160, inner=712, bias=True)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for call, transposed in ((SILU, False), (PLAIN, False), (CLAMPED, True), (SILU, True)):
        made = make_operands(replace(sizes, transposed=transposed), call, torch.bfloat16, 1, device="cuda")
        operands = replace(made, experts=ids.cuda()[:, None])
        want = launch(operands, call)
        for lag in (0, 1, 2):
            assert torch.equal(launch_one(operands, call, lag=lag), want), f"{call} {transposed} {lag}"
