"""The kernels of `moe_experts` against the plain expression, in CUDA graphs, and with NaN around their operands."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.gpu.captured import captured
from tests.graphs.experts_cases import (
    CALLS,
    ROUTINGS,
    Sizes,
    expected,
    make_experts,
    make_operands,
    poisoned,
    random_sizes,
)
from tests.graphs.experts_routing import EXPERTS, POISON, ROWS, TILE_ROWS, assert_sorted, cases, empty_table
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.plan import ExpertsLaunch, candidates, plan
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

pytestmark = pytest.mark.gpu
SILU, CLAMPED = CALLS[0], CALLS[5]
QWEN = Sizes(choices=8, experts=64, hidden=2048, inner=768)
GPT_OSS = Sizes(choices=4, experts=16, hidden=2880, inner=2880, bias=True, transposed=True)


def run(operands: ExpertOperands, call: ExpertsCall) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, call.encode(),
    )  # fmt: skip
    return result


def check(operands: ExpertOperands, call: ExpertsCall, what: str, how: ExpertsLaunch | None = None) -> torch.Tensor:
    assert gpu.has_kernels(operands, checked_shape(operands, call)), what
    got = run(operands, call) if how is None else gpu.launch(operands, call, how)
    assert_close(got, reference(operands, call), KERNEL, f"{what} {how}")
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_sum_token_by_token(routing: str, dtype: torch.dtype) -> None:
    for seed, call in enumerate(some(CALLS)):
        sizes = random_sizes(random.Random(seed * 31 + ROUTINGS.index(routing)))
        operands = poisoned(make_operands(sizes, call, dtype, seed, routing, "cuda"))
        plain = make_operands(sizes, call, dtype, seed, routing)
        assert_close(run(operands, call).cpu(), expected(plain, call).to(dtype), KERNEL, f"{sizes} {call}")


@pytest.mark.parametrize("tokens", [1, 8, 64, 300, 512, 3000])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "one_expert", "some_foreign"])
def test_sizes_of_models(tokens: int, routing: str) -> None:
    for sizes, call in ((QWEN, SILU), (GPT_OSS, CLAMPED)):
        operands = make_operands(replace(sizes, tokens=tokens), call, torch.bfloat16, tokens, routing, "cuda")
        check(operands, call, f"{sizes} {tokens} {routing}")


@pytest.mark.parametrize("tokens", [4, 100, 700])
def test_every_launch_that_a_sweep_tries(tokens: int) -> None:
    operands = make_operands(replace(QWEN, tokens=tokens, inner=1024), SILU, torch.bfloat16, 1, "skewed", "cuda")
    for how in candidates(checked_shape(operands, SILU), gpu.num_sms(operands.x.device)):
        check(operands, SILU, f"{tokens} tokens", how)


@pytest.mark.parametrize("choices", [1, 2, 4, 6, 8, 16])
def test_every_number_of_choices(choices: int) -> None:
    for tokens in (1, 37):
        sizes = Sizes(
            tokens=tokens, choices=choices, experts=24, hidden=256, inner=128, weights_in_fp32=choices % 4 == 0
        )
        check(make_operands(sizes, SILU, torch.bfloat16, choices, "some_foreign", "cuda"), SILU, str(sizes))


@pytest.mark.parametrize("tokens", [1, 16, 512, 3000])
def test_a_graph_sees_what_is_routed_at_its_replay(tokens: int) -> None:
    sizes = replace(QWEN, tokens=tokens)
    operands = make_operands(sizes, SILU, torch.bfloat16, 0, "uniform", "cuda")
    graph, got = captured(lambda: run(operands, SILU))
    generator = torch.Generator().manual_seed(1)
    for routing in (*ROUTINGS, "uniform"):
        operands.experts.copy_(make_experts(routing, sizes, generator))
        operands.x.normal_()
        operands.weights.uniform_()
        graph.replay()
        assert_close(got, reference(operands, SILU), KERNEL, f"{tokens} tokens, {routing}")


@pytest.mark.parametrize("tokens", [8, 300, 3000])
def test_calls_repeat_bit_by_bit(tokens: int) -> None:
    operands = make_operands(replace(QWEN, tokens=tokens), SILU, torch.bfloat16, 3, "skewed", "cuda")
    how = plan(checked_shape(operands, SILU), gpu.num_sms(operands.x.device))
    first = gpu.launch(operands, SILU, how)
    for at in range(20):
        again = gpu.launch(operands, SILU, replace(how, early=at % 2 == 0))
        assert torch.equal(again, first), f"call {at}"


def test_no_tokens() -> None:
    assert run(make_operands(Sizes(tokens=0), SILU, torch.bfloat16, 1, device="cuda"), SILU).shape == (0, 40)


def test_fp32_is_the_plain_expression_and_can_be_captured() -> None:
    operands = make_operands(Sizes(tokens=9, choices=3, experts=5), SILU, torch.float32, 2, "some_foreign", "cuda")
    assert not gpu.has_kernels(operands, checked_shape(operands, SILU))
    run(operands, SILU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(operands, SILU)
    operands.x.normal_()
    graph.replay()
    assert_close(got, reference(operands, SILU), KERNEL)


def native_routing() -> bool:
    return torch.cuda.is_available() and gpu.has_native_routing(torch.device("cuda", torch.cuda.current_device()))


needs_native_routing = pytest.mark.skipif(not native_routing(), reason="the CUDA part was not built for this GPU")


class NativeRouting:
    """`order` and `table` of one call's shape, and the experts that they are made of."""

    def __init__(self, num_rows: int, num_experts: int, tile_rows: int) -> None:
        self.experts = torch.empty(num_rows, dtype=torch.int64, device="cuda")
        self.order = torch.empty(num_rows, dtype=torch.int32, device="cuda")
        self.table = empty_table(num_rows, num_experts, tile_rows, "cuda")
        self.shape, self.tile_rows = ExpertsShape(num_rows, 1, num_experts, 16, 16), tile_rows

    def run(self, early: bool = True) -> None:
        self.order.fill_(POISON)
        self.table.fill_(POISON)
        gpu.sort_natively(self.experts, self.shape, self.tile_rows, early, self.order, self.table)

    def check(self) -> None:
        assert_sorted(self.order, self.table, self.experts, self.shape.experts, self.tile_rows)


@needs_native_routing
@pytest.mark.parametrize("num_rows", (*ROWS, 8192, 131072, 262144, 1000003))
def test_native_routing_equals_a_stable_sort(num_rows: int) -> None:
    for num_experts in some(EXPERTS if num_rows <= 1 << 17 else EXPERTS[2::3]):
        for at, (name, experts) in enumerate(some(cases(num_rows, num_experts))):
            routing = NativeRouting(num_rows, num_experts, TILE_ROWS[(at + num_experts) % len(TILE_ROWS)])
            routing.experts.copy_(experts)
            routing.run(early=at % 3 > 0)
            try:
                routing.check()
            except AssertionError as wrong:
                raise AssertionError(f"{num_experts} experts, {name}") from wrong


@needs_native_routing
@pytest.mark.parametrize("num_rows", [1024, 8192, 262144])
def test_native_routing_repeats_bit_by_bit(num_rows: int) -> None:
    routing = NativeRouting(num_rows, 64, 32)
    routing.experts.random_(-20, 84)
    routing.run()
    order, table = routing.order.clone(), routing.table.clone()
    for at in range(50):
        routing.run(early=at % 2 == 0)
        assert torch.equal(routing.order, order) and torch.equal(routing.table, table), f"call {at}"


@needs_native_routing
@pytest.mark.parametrize("num_rows", [700, 5000, 131072])
def test_a_graph_sorts_the_experts_of_its_replay(num_rows: int) -> None:
    """Several calls in a row, each by the rows that the one before has sorted: none begins too early."""
    first, second = NativeRouting(num_rows, 64, 32), NativeRouting(num_rows, 64, 128)
    first.experts.random_(0, 64)

    def run() -> None:
        first.run()
        second.experts.copy_(first.order % 67 - 2)
        second.run()

    graph, _ = captured(run)
    for _, experts in some(cases(num_rows, 64)):
        first.experts.copy_(experts)
        graph.replay()
        first.check()
        second.check()


@needs_native_routing
def test_routing_of_many_rows_is_native_and_that_of_few_is_tritons() -> None:
    """Both leave the same."""
    for rows in (1024, 1025):
        experts = torch.randint(-3, 40, (rows, 1), device="cuda")
        shape = ExpertsShape(rows, 1, 32, 16, 16)
        how = plan(shape, 132)
        order, table = gpu.route(experts, shape, how, early=True)
        want_order, want_table = torch.empty_like(order), torch.empty_like(table)
        gpu.sort_by_triton(experts, shape, how.rows, False, want_order, want_table)
        own, tiles = int(((experts >= 0) & (experts < 32)).sum()), int(want_table[0, 0])
        assert torch.equal(order[:own], want_order[:own])
        assert int(table[0, 0]) == tiles and torch.equal(table[1 : 1 + tiles, :3], want_table[1 : 1 + tiles, :3])
