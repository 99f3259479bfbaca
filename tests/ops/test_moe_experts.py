"""`weave::moe_experts` on the CPU, traced, and what it refuses."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace

import pytest
import torch

import weaveopt.ops  # noqa: F401
from tests.graphs.experts_cases import CALLS, ROUTINGS, Sizes, expected, make_operands, poisoned, random_sizes
from tests.graphs.nonempty import some
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt.errors import WeaveError
from weaveopt.ops.experts import by_expert, library
from weaveopt.ops.experts.call import ExpertsCall, decode
from weaveopt.ops.experts.library import plain
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SILU = CALLS[0]


def arguments(operands: ExpertOperands, call: ExpertsCall) -> tuple[torch.Tensor | str | None, ...]:
    return (
        operands.x, operands.experts, operands.weights, operands.gate_up, operands.gate_up_bias, operands.down,
        operands.down_bias, call.encode(),
    )  # fmt: skip


def run(operands: ExpertOperands, call: ExpertsCall) -> torch.Tensor:
    result: torch.Tensor = torch.ops.weave.moe_experts(*arguments(operands, call))
    return result


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_sum_token_by_token(routing: str, dtype: torch.dtype) -> None:
    for seed, call in enumerate(some(CALLS)):
        sizes = random_sizes(random.Random(seed * 31 + ROUTINGS.index(routing)))
        operands = make_operands(sizes, call, dtype, seed, routing)
        want = expected(operands, call).to(dtype)
        assert_close(run(operands, call), want, KERNEL, f"{sizes} {call}")
        assert_close(reference(operands, call), want, KERNEL, f"reference of {sizes} {call}")
        assert_close(plain(operands, call), want, KERNEL, f"plain form of {sizes} {call}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own_gemm", [False, True])
def test_many_rows_an_expert(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, own_gemm: bool) -> None:
    """With and without a GEMM of the dtype, and with weights that are widened in several blocks."""
    monkeypatch.setattr(by_expert, "has_gemm", lambda _: own_gemm)
    monkeypatch.setattr(by_expert, "WIDEN_BLOCK_ELEMENTS", 500)
    for bias in (False, True):
        sizes = Sizes(tokens=70, choices=2, experts=3, hidden=48, inner=33, bias=bias, transposed=bias)
        operands = make_operands(sizes, SILU, dtype, 1, "skewed")
        assert_close(run(operands, SILU), expected(operands, SILU).to(dtype), KERNEL, str(sizes))


@pytest.mark.parametrize("routing", ["skewed", "some_foreign", "one_expert"])
def test_rows_and_tokens_in_blocks(monkeypatch: pytest.MonkeyPatch, routing: str) -> None:
    """Blocks of one expert and of several, and the last tokens, give the same bits as all rows at once."""
    operands = make_operands(Sizes(tokens=41, choices=3, experts=7, bias=True), SILU, torch.bfloat16, 5, routing)
    at_once = run(operands, SILU)
    assert_close(at_once, expected(operands, SILU).to(torch.bfloat16), KERNEL, routing)
    monkeypatch.setattr(by_expert, "BLOCK_ROWS", 20)
    monkeypatch.setattr(library, "COMBINED_TOKENS", 8)
    ranges = by_expert.ranges_of([7, 0, 30, 5, 15, 1])
    assert [[each.expert for each in block] for _, block in by_expert.blocks_of(ranges)] == [[0], [2], [3, 4], [5]]
    assert torch.equal(run(operands, SILU), at_once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nobody_chose_may_be_anything(dtype: torch.dtype) -> None:
    for routing in ("some_foreign", "one_expert", "all_foreign"):
        operands = make_operands(Sizes(tokens=9, choices=3, experts=4, bias=True), SILU, dtype, 2, routing)
        if routing == "all_foreign":
            assert not run(poisoned(operands), SILU).any()
        for op in (run, reference, plain):
            assert_close(op(poisoned(operands), SILU), expected(operands, SILU).to(dtype), KERNEL, routing)


def test_a_token_without_bounds_is_its_own_matter() -> None:
    operands = make_operands(Sizes(tokens=6, choices=2), SILU, torch.float32, 3)
    operands.x[2] = math.nan
    operands.x[4, 1] = math.inf
    got, want = run(operands, SILU), expected(operands, SILU).float()
    assert got[2].isnan().all() and not got[4].isfinite().all()
    good = [0, 1, 3, 5]
    assert_close(got[good], want[good], KERNEL)


def test_no_tokens() -> None:
    operands = make_operands(Sizes(tokens=0), SILU, torch.bfloat16, 1)
    assert run(operands, SILU).shape == (0, 40)


def test_calls_repeat_bit_by_bit() -> None:
    operands = make_operands(Sizes(tokens=33, choices=4, experts=8), SILU, torch.bfloat16, 4, "skewed")
    first = run(operands, SILU)
    assert all(torch.equal(run(operands, SILU), first) for _ in range(5))


@pytest.mark.parametrize("call", CALLS)
def test_traced_results_are_the_real_ones(call: ExpertsCall) -> None:
    for sizes in (Sizes(), Sizes(tokens=0), Sizes(bias=True, transposed=True)):
        operands = make_operands(sizes, call, torch.float32, 1, "some_foreign")
        torch.library.opcheck(torch.ops.weave.moe_experts.default, arguments(operands, call))


def test_needs_no_gradients() -> None:
    operands = make_operands(Sizes(), SILU, torch.float32, 1)
    operands.gate_up.requires_grad_()
    assert_close(run(operands, SILU).detach(), expected(operands, SILU).float(), KERNEL)


def test_the_op_runs_compiled() -> None:
    operands, call = make_operands(Sizes(tokens=7), SILU, torch.float32, 4), SILU.encode()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.weave.moe_experts(
            x * 2, experts, weights, operands.gate_up, None, operands.down, None, call
        )
        return result + x

    got = compiled(operands.x, operands.experts, operands.weights)
    doubled = replace(operands, x=operands.x * 2)
    assert_close(got, run(doubled, SILU) + operands.x, KERNEL)


@pytest.mark.parametrize("call", CALLS)
def test_calls_are_read_as_they_were_written(call: ExpertsCall) -> None:
    assert decode(call.encode()) == call
    assert [type(field) for field in astuple(decode(call.encode()))] == [str, bool, bool, float, float, str, tuple]


def test_says_what_is_no_call() -> None:
    wrong = {
        "not an encoded moe_experts call": "{}",
        "not an encoded": "[1]",
        "did you mean 'silu'": replace(SILU, activation="silo").encode(),
        "not gated": replace(SILU, gated=False, interleaved=True).encode(),
        "finite number above 0": replace(SILU, limit=-1.0).encode(),
        "takes gate and up": ExpertsCall("clamped_swish", gated=False, alpha=1.0, limit=1.0).encode(),
        "a finite alpha": replace(SILU, activation="clamped_swish", alpha=math.nan, limit=1.0).encode(),
    }
    for words, text in wrong.items():
        with pytest.raises(WeaveError, match=words):
            decode(text)


def test_says_what_does_not_belong_together() -> None:
    good = make_operands(Sizes(bias=True), SILU, torch.float32, 1)
    wrong = {
        r"of 2 dimensions.* found \[3, 2, 2, 3, 3\]": replace(good, x=good.x[None]),
        r"\[T, H\], \[T, k\] and \[T, k\]": replace(good, experts=good.experts[:3]),
        r"\[T, H\], \[T, k\] and \[T, k\] do": replace(good, weights=good.weights[:, :1]),
        r"\[E, 2 \* I, H\] and \[E, H, I\]": replace(good, gate_up=good.gate_up[:, :-1]),
        r"and \[E, H, I\] do": replace(good, down=good.down[:1]),
        "none may be 0": replace(good, gate_up=good.gate_up[:0], down=good.down[:0]),
        r"gate_up_bias is \[4, 47\]": replace(good, gate_up_bias=torch.zeros(4, 47)),
        "down_bias is .*torch.float64": replace(good, down_bias=torch.zeros(4, 40, dtype=torch.float64)),
        "all of one": replace(good, down=good.down.bfloat16()),
        "experts in torch.int64": replace(good, experts=good.experts.int()),
        "weights in torch.float32 or": replace(good, weights=good.weights.half()),
    }
    for words, operands in wrong.items():
        with pytest.raises(WeaveError, match=words):
            run(operands, SILU)
