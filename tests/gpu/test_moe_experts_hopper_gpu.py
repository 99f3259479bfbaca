"""The native GEMMs of `moe_experts` on Hopper against the plain expression, in CUDA graphs, and with NaN around their
operands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.gpu.captured import captured
from tests.graphs.experts_cases import CALLS, ROUTINGS, Sizes, make_experts, make_operands, poisoned
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.ops.experts import gpu, hopper
from weaveopt.ops.experts.call import ExpertsCall, ExpertsKernel
from weaveopt.ops.experts.plan import TRITON_ROUTING_ROWS
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, checked_shape

SILU, PLAIN, CLAMPED = CALLS[0], CALLS[3], CALLS[5]
QWEN = Sizes(choices=8, experts=64, hidden=2048, inner=768)
GPT_OSS = Sizes(choices=4, experts=16, hidden=2880, inner=2880, bias=True, transposed=True)
MIXTRAL = Sizes(choices=2, experts=4, hidden=6144, inner=1024)
SMALL = Sizes(tokens=300, choices=2, experts=3, hidden=136, inner=264, bias=True)


def has_kernels() -> bool:
    return torch.cuda.is_available() and hopper.runs_on(torch.device("cuda", torch.cuda.current_device()))


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_kernels(), reason="they are for GPUs of compute capability 9.0, built with CUDA"),
]


def run(operands: ExpertOperands, call: ExpertsCall, kernels: ExpertsKernel = ExpertsKernel.HOPPER) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, replace(call, kernels=kernels).encode(),
    )  # fmt: skip
    return result


def launch(operands: ExpertOperands, call: ExpertsCall, group: int = 4) -> torch.Tensor:
    """These kernels, and no others."""
    shape = checked_shape(operands, call)
    assert not (why := hopper.unsupported(operands, shape)), why
    return hopper.launch(operands, call, replace(hopper.plan(shape), group=group))


def launch_wide(operands: ExpertOperands, call: ExpertsCall, group: int = 4) -> torch.Tensor:
    """Those for many rows an expert."""
    shape = checked_shape(operands, call)
    how = hopper.wide_plan(operands, shape)
    assert how.wide, "of weights whose depth lies side by side"
    return hopper.launch(operands, call, replace(how, group=group))


def launch_one(operands: ExpertOperands, call: ExpertsCall, group: int = 4, lag: int = hopper.LAG) -> torch.Tensor:
    """Both GEMMs in one kernel."""
    how = hopper.one_plan(operands, checked_shape(operands, call))
    assert how.one_kernel, "of weights that lie alike"
    return hopper.launch(operands, call, replace(how, group=group, lag=lag))


def check(operands: ExpertOperands, call: ExpertsCall, what: str) -> None:
    want = reference(operands, call)
    got = launch(poisoned(operands), call)
    assert_close(got, want, KERNEL, what)
    assert torch.equal(launch_one(poisoned(operands), call), got), f"one kernel, {what}"
    if operands.gate_up.stride(2) == operands.down.stride(2) == 1:
        assert_close(launch_wide(poisoned(operands), call), want, KERNEL, f"wide, {what}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_activation(routing: str, dtype: torch.dtype) -> None:
    for seed, call in enumerate(some(CALLS)):
        for bias, transposed in ((False, False), (True, False), (False, True), (True, True)):
            sizes = replace(SMALL, bias=bias, transposed=transposed)
            check(make_operands(sizes, call, dtype, seed, routing, "cuda"), call, f"{call} {routing} {sizes}")


@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (64, 64), (72, 40), (264, 1032), (1024, 520)])
@pytest.mark.parametrize("call", [SILU, PLAIN, CLAMPED], ids=["gated", "plain", "interleaved"])
def test_sizes_that_fill_no_tile(hidden: int, inner: int, call: ExpertsCall) -> None:
    for tokens, transposed in ((1, False), (5, True), (129, False), (700, False), (700, True)):
        sizes = Sizes(tokens, choices=3, experts=5, hidden=hidden, inner=inner, bias=True, transposed=transposed)
        operands = make_operands(sizes, call, torch.bfloat16, tokens, "some_foreign", "cuda")
        check(operands, call, f"{sizes} {call}")


@pytest.mark.parametrize("counts", [(288, 0, 1), (289, 300), (64, 65, 128), (161, 63), (0, 0, 575), (2000,)])
def test_experts_whose_rows_end_anywhere(counts: tuple[int, ...]) -> None:
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=512, inner=384)
    operands = make_operands(sizes, SILU, torch.bfloat16, 1, device="cuda")
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    mixed = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))].cuda()
    check(replace(operands, experts=mixed[:, None]), SILU, str(counts))


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 600, 3000, 8192])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "one_expert", "some_foreign", "all_foreign"])
def test_sizes_of_models(tokens: int, routing: str) -> None:
    for sizes, call in ((QWEN, SILU), (MIXTRAL, SILU), (GPT_OSS, CLAMPED)):
        operands = make_operands(replace(sizes, tokens=tokens), call, torch.bfloat16, tokens, routing, "cuda")
        assert not hopper.unsupported(operands, checked_shape(operands, call))
        want = reference(operands, call)
        for kernels in (ExpertsKernel.HOPPER, ExpertsKernel.ONE, ExpertsKernel.WIDE):
            assert_close(run(operands, call, kernels), want, KERNEL, f"{kernels} {sizes} {tokens} {routing}")


def test_every_width_of_a_multiply() -> None:
    """Instructions 8 to 144 rows wide in each CTA; repeated calls return the same bits."""
    counts = (*range(1, 289, 5), 288, 0, 289)
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=1160, inner=712, bias=True)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for call, transposed in ((SILU, False), (PLAIN, False), (CLAMPED, True), (SILU, True)):
        made = make_operands(replace(sizes, transposed=transposed), call, torch.bfloat16, 1, device="cuda")
        operands = replace(made, experts=ids.cuda()[:, None])
        got = launch(operands, call)
        assert_close(got, reference(operands, call), KERNEL, f"{call} {transposed}")
        for _ in range(10):
            assert torch.equal(launch(operands, call), got), f"{call} {transposed}"


def test_every_width_of_a_wide_multiply() -> None:
    counts = (*range(1, 257, 5), 256, 0, 257, 2000)
    sizes = Sizes(tokens=sum(counts), choices=1, experts=len(counts), hidden=1160, inner=712, bias=True)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for call in (SILU, PLAIN, CLAMPED):
        made = make_operands(sizes, call, torch.bfloat16, 1, device="cuda")
        operands = replace(made, experts=ids.cuda()[:, None])
        got = launch_wide(operands, call)
        assert_close(got, reference(operands, call), KERNEL, str(call))
        for group in (1, 2, 8, 64, 4, 4, 4, 4, 4, 4):
            assert torch.equal(launch_wide(operands, call, group), got), f"{call} {group}"


@pytest.mark.parametrize("kernels", [ExpertsKernel.HOPPER, ExpertsKernel.ONE, ExpertsKernel.WIDE])
@pytest.mark.parametrize("tokens", [8, 1000, 3000])
def test_a_graph_sees_what_is_routed_at_its_replay(tokens: int, kernels: ExpertsKernel) -> None:
    sizes = replace(QWEN, tokens=tokens)
    operands = make_operands(sizes, SILU, torch.bfloat16, 0, "uniform", "cuda")
    graph, got = captured(lambda: run(operands, SILU, kernels))
    generator = torch.Generator().manual_seed(1)
    for routing in (*ROUTINGS, "uniform"):
        operands.experts.copy_(make_experts(routing, sizes, generator))
        operands.x.normal_()
        operands.weights.uniform_()
        graph.replay()
        assert_close(got, reference(operands, SILU), KERNEL, f"{tokens} tokens, {routing}")


def test_calls_repeat_bit_by_bit() -> None:
    operands = make_operands(replace(QWEN, tokens=3000), SILU, torch.bfloat16, 3, "skewed", "cuda")
    first = launch(operands, SILU)
    for group in (1, 2, 8, 64, 8, 8, 8, 8):
        assert torch.equal(launch(operands, SILU, group), first), group


def test_what_is_not_finite_stays_in_its_row() -> None:
    operands = make_operands(SMALL, SILU, torch.bfloat16, 6, device="cuda")
    others = [row for row in range(SMALL.tokens) if row != 4]
    finite = operands.x[4].clone()
    for launched in (launch, launch_wide):
        operands.x[4] = finite
        want = launched(operands, SILU)
        operands.x[4] = math.nan
        got = launched(operands, SILU)
        assert got[4].isnan().all() and torch.equal(got[others], want[others])


def test_what_they_do_not_take_is_tritons() -> None:
    """Weights with gaps along both axes, rows that are not aligned, fp32; and the result is the same."""
    many = replace(SMALL, tokens=700)
    odd = make_operands(replace(many, hidden=67), SILU, torch.bfloat16, 1, device="cuda")
    wide = make_operands(replace(SMALL, tokens=70), SILU, torch.float32, 1, device="cuda")
    apart = make_operands(many, SILU, torch.bfloat16, 1, device="cuda")
    apart = replace(apart, down=torch.stack((apart.down, apart.down), -1)[..., 0])
    for operands in (odd, wide, apart):
        assert hopper.unsupported(operands, checked_shape(operands, SILU))
        assert_close(run(operands, SILU), reference(operands, SILU), KERNEL, str(checked_shape(operands, SILU)))


def test_rows_of_x_may_lie_apart() -> None:
    operands = make_operands(replace(SMALL, tokens=700), SILU, torch.bfloat16, 5, device="cuda")
    apart = torch.full((700, 200), math.nan, dtype=torch.bfloat16, device="cuda")
    apart[:, 16:152] = operands.x
    assert torch.equal(launch(replace(operands, x=apart[:, 16:152]), SILU), launch(operands, SILU))
    columns = replace(operands, x=operands.x.T.contiguous().T)
    assert torch.equal(launch(columns, SILU), launch(operands, SILU))
    assert torch.equal(launch_wide(replace(operands, x=apart[:, 16:152]), SILU), launch_wide(operands, SILU))


def test_many_rows_are_routed_natively() -> None:
    operands = make_operands(replace(SMALL, tokens=9000, experts=7), SILU, torch.bfloat16, 8, "skewed", "cuda")
    shape = checked_shape(operands, SILU)
    assert shape.rows > TRITON_ROUTING_ROWS and gpu.has_native_routing(operands.x.device)
    assert gpu.has_kernels(operands, shape)
    check(operands, SILU, "native routing")
