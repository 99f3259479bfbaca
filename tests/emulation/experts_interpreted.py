"""The Triton kernels of `moe_experts`, run by Triton's interpreter: `TRITON_INTERPRET=1 python -m` this file.

Prints a line of JSON for each check: its name, and what was wrong or null. A process of its own, since Triton decides
at its first import whether it interprets.
"""

from __future__ import annotations

import json
import math
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import torch

from tests.graphs.experts_cases import (
    CALLS,
    NUM_RANGES,
    ROUTINGS,
    Sizes,
    expected,
    in_ranges,
    make_experts,
    make_operands,
    poisoned,
    random_sizes,
    uneven,
)
from tests.graphs.experts_routing import POISON, assert_sorted, empty_table
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks.simulated import TEST_ALL
from weaveopt.ops.experts import gpu
from weaveopt.ops.experts.call import ExpertsCall
from weaveopt.ops.experts.plan import ExpertsLaunch, plan
from weaveopt.ops.experts.reference import reference
from weaveopt.ops.experts.shapes import ExpertOperands, ExpertsShape, checked_shape

SILU, INTERLEAVED, UNGATED, CLAMPED = CALLS[0], CALLS[1], CALLS[3], CALLS[5]


def check(operands: ExpertOperands, call: ExpertsCall, how: ExpertsLaunch | None = None) -> None:
    shape = checked_shape(operands, call)
    how = how or plan(shape, 132, call.gated)
    got = gpu.launch(poisoned(operands), call, how)
    assert_close(got, expected(operands, call).to(operands.x.dtype), KERNEL, f"{shape} {call} {how}")
    assert got.is_contiguous()


def planned(at: int) -> None:
    """Every activation and routing, as the plan has them."""
    call, dtype = CALLS[at % len(CALLS)], (torch.float16, torch.bfloat16)[at % 2]
    sizes = replace(random_sizes(random.Random(at)), experts=(1, 3, 5)[at % 3])
    check(make_operands(sizes, call, dtype, at, ROUTINGS[at % len(ROUTINGS)]), call)


def small(how: ExpertsLaunch, **tile: int | bool) -> ExpertsLaunch:
    """Tiles that small sizes have several of in every direction."""
    gate_up = replace(how.gate_up, columns=16, depth=16, **tile)
    return replace(how, rows=16, gate_up=gate_up, down=replace(gate_up, columns=32), combine_columns=32)


def many_tiles(call: ExpertsCall, swap: bool, splits: int, group: int) -> None:
    sizes = Sizes(tokens=21, choices=2, experts=2, hidden=51, inner=35, bias=True, transposed=swap)
    operands = make_operands(sizes, call, torch.float16, 7, "skewed")
    how = small(plan(checked_shape(operands, call), 132), swap=swap)
    check(operands, call, replace(how, splits=splits, group=group))


def result_buffers(swap: bool) -> None:
    """The second GEMM's rows at three ranks: those of all in one tensor, where nothing is at other places."""
    sizes = Sizes(tokens=21, choices=2, experts=2, hidden=51, inner=35, bias=True, transposed=swap)
    operands = make_operands(sizes, SILU, torch.float16, 7, "some_foreign")
    shape = checked_shape(operands, SILU)
    how = small(plan(shape, 132), swap=swap)
    order, table = gpu.route(operands.experts, shape, how, False)
    weights = operands.of_experts
    inner = gpu.first_gemm(operands.x, order, table, weights, SILU, shape, how)
    together = torch.full((1, shape.rows, shape.hidden), -777.0, dtype=torch.float16)
    gpu.second_gemm(inner, order, table, weights, together, shape, how)
    apart = [torch.full((14, shape.hidden), -777.0, dtype=torch.float16) for _ in range(3)]
    addresses = torch.tensor([each.data_ptr() for each in apart])
    gpu.second_gemm(inner, order, table, weights, addresses, shape, how, 14)
    assert torch.equal(torch.cat(apart), together[0])
    assert (together != -777.0).any() and (together == -777.0).any()


def ranges(num_ranges: int, transposed: bool, swap: bool) -> None:
    """Weights in several tensors: the bits of one tensor, with splits and without; some experts have no rows. A routing
    each, and every routing with `make test-all`."""
    sizes = Sizes(tokens=13, choices=2, experts=9, hidden=35, inner=19, bias=True, transposed=transposed)
    routings = ("skewed", "one_expert", "some_foreign")
    at = (NUM_RANGES.index(num_ranges) + swap) % len(routings)
    for routing in routings if TEST_ALL else routings[at : at + 1]:
        operands = poisoned(make_operands(sizes, SILU, torch.bfloat16, num_ranges, routing))
        how = replace(small(plan(checked_shape(operands, SILU), 132), swap=swap), splits=1 + swap)
        cut = in_ranges(operands, uneven(9, num_ranges), uneven(9, num_ranges)[::-1])
        want = gpu.launch(operands, SILU, how)
        assert torch.equal(gpu.launch(cut, SILU, how), want), routing
        assert_close(want, reference(cut, SILU), KERNEL, routing)


def routing(experts: int) -> None:
    """Against a stable sort; blocks are so small that there are several."""
    generator = torch.Generator().manual_seed(experts)
    for name in ROUTINGS:
        ids = make_experts(name, Sizes(tokens=67, choices=3, experts=experts), generator)
        order = torch.full((201,), POISON, dtype=torch.int32)
        shape = ExpertsShape(67, 3, experts, 16, 16)
        table = empty_table(shape.rows, experts, 16)
        with mock.patch.object(gpu, "ROUTE_BLOCK", 64):
            gpu.sort_by_triton(ids, shape, 16, False, order, table)
        assert_sorted(order, table, ids, experts, 16)


def not_finite() -> None:
    """In a token, and in what is clamped: its own matter, and it stays visible."""
    operands = make_operands(Sizes(tokens=6, choices=2, experts=3), CLAMPED, torch.float16, 3)
    operands.x[2] = math.nan
    got = gpu.launch(operands, CLAMPED, plan(checked_shape(operands, CLAMPED), 132))
    good = [0, 1, 3, 4, 5]
    assert got[2].isnan().all(), got[2]
    assert_close(got[good], expected(operands, CLAMPED)[good].half(), KERNEL)


def odd_strides() -> None:
    """Rows of x apart, weights of choices transposed and in fp32, ids not contiguous, no tokens."""
    operands = make_operands(Sizes(tokens=5, choices=2, experts=3, weights_in_fp32=True), SILU, torch.float16, 4)
    apart = torch.zeros(5, 100, dtype=torch.float16)
    apart[:, 10:50] = operands.x
    turned = replace(
        operands,
        x=apart[:, 10:50],
        weights=operands.weights.T.contiguous().T,
        experts=operands.experts.T.contiguous().T,
    )
    how = plan(checked_shape(operands, SILU), 132)
    assert torch.equal(gpu.launch(turned, SILU, how), gpu.launch(operands, SILU, how))
    empty = make_operands(Sizes(tokens=0), SILU, torch.float16, 1)
    assert gpu.launch(empty, SILU, how).shape == (0, 40)


def repeats() -> None:
    operands = make_operands(Sizes(tokens=20, choices=2, experts=3), SILU, torch.float16, 5, "skewed")
    how = replace(small(plan(checked_shape(operands, SILU), 132)), splits=2)
    first = gpu.launch(operands, SILU, how)
    assert torch.equal(gpu.launch(operands, SILU, how), first)


CHECKS: dict[str, Callable[[], None]] = {
    **{f"planned {at}": partial(planned, at) for at in range(14)},
    **{
        f"{call.activation} gated {call.gated} swap {swap} splits {splits} group {group}": partial(
            many_tiles, call, swap, splits, group
        )
        for call, swap, splits, group in (
            (SILU, False, 1, 1), (SILU, True, 3, 2), (INTERLEAVED, True, 1, 8), (INTERLEAVED, False, 2, 8),
            (UNGATED, False, 3, 1), (UNGATED, True, 1, 4),
        )
    },
    **{f"routing of {experts}": partial(routing, experts) for experts in (1, 9)},
    **{f"result buffers swap {swap}": partial(result_buffers, swap) for swap in (False, True)},
    **{
        f"{num_ranges} ranges transposed {transposed} swap {swap}": partial(ranges, num_ranges, transposed, swap)
        for num_ranges in NUM_RANGES
        for transposed, swap in ((False, False), (True, True))
    },
    "not finite": not_finite,
    "odd strides": odd_strides,
    "repeats": repeats,
}  # fmt: skip


def main() -> None:
    from tests.emulation.triton_interpreter import interpreting

    with interpreting():
        for name, run in CHECKS.items():
            try:
                run()
                wrong = None
            except Exception:  # whatever it is, it is told, and the other checks still run
                wrong = traceback.format_exc()[-3000:]
            print(json.dumps({"name": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
