"""The kernels of `moe_experts` against the plain expression, in CUDA graphs, and beside NaN."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.experts_cases import CALLS, ROUTINGS, Sizes, expected, make_experts, make_operands, poisoned, random_sizes
from tests.tolerances import KERNEL, assert_close
from weaveopt.ops.moe_experts import gpu
from weaveopt.ops.moe_experts.call import ExpertsCall
from weaveopt.ops.moe_experts.plan import Plan, candidates, plan
from weaveopt.ops.moe_experts.reference import reference
from weaveopt.ops.moe_experts.shapes import Operands, checked_shape

pytestmark = pytest.mark.gpu
SILU, CLAMPED = CALLS[0], CALLS[5]
QWEN = Sizes(choices=8, experts=64, hidden=2048, inner=768)
GPT_OSS = Sizes(choices=4, experts=16, hidden=2880, inner=2880, bias=True, transposed=True)


def run(operands: Operands, call: ExpertsCall) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, call.encode(),
    )  # fmt: skip
    return result


def check(operands: Operands, call: ExpertsCall, what: str, how: Plan | None = None) -> torch.Tensor:
    assert gpu.has_kernels(operands, checked_shape(operands, call)), what
    got = run(operands, call) if how is None else gpu.launch(operands, call, how)
    assert_close(got, reference(operands, call), KERNEL, f"{what} {how}")
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_sum_token_by_token(routing: str, dtype: torch.dtype) -> None:
    for seed, call in enumerate(CALLS):
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
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(operands, SILU)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(operands, SILU)
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
