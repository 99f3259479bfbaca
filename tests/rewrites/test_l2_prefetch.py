"""The weights behind a site: how much of them is loaded into L2, what that saves, and what becomes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from tests import forms
from tests.calls import calls
from tests.preview import previewed
from weaveopt import cost_model
from weaveopt.cost_model.l2_prefetch import (
    NOTHING_US,
    OPERATION,
    Order,
    Prefetched,
    is_measured,
    parse_variant,
    prefetched,
    variant_of,
)
from weaveopt.cost_model.machine import KernelCurve, Machine, SizePoint
from weaveopt.errors import ProfileError
from weaveopt.graph.pattern import tensor_of
from weaveopt.records.report import GraphReport
from weaveopt.reductions.call import Prefetch, ReductionCall, decode
from weaveopt.reductions.prefetch_ranges import ranges_of

H200 = cost_model.load("h200x4")
HIDDEN, INNER, WORLD = 4096, 256, 4
MIB = 1 << 20
POINTS = ((1 * MIB, 0.25), (4 * MIB, 1.0), (16 * MIB, 2.0))
RULE = "all_reduce_rms_norm"


def curve(order: Order, tokens: int, *points: tuple[int, float], world: int = WORLD) -> KernelCurve:
    sized = tuple(SizePoint(*point) for point in points or POINTS)
    return KernelCurve(H200.memory.origin, OPERATION, variant_of(order, tokens, world), "bytes", sized)


def with_curves(*curves: KernelCurve) -> Machine:
    return replace(H200, name="prefetching", kernels=(*H200.kernels, *curves))


def worth(machine: Machine, exchange_us: float, weights: int = 64 * MIB, tokens: int = 8) -> Prefetched | None:
    return prefetched(machine, WORLD, tokens, exchange_us, weights, 4096)


def test_a_variant_is_parsed_as_it_is_written() -> None:
    for order in Order:
        assert parse_variant(variant_of(order, 8, 2)) == (order, 8, 2)
    for wrong in ("front", "back tokens=8 ranks=2", "front tokens=8", "front tokens=x ranks=2", "front ranks=2 tokens"):
        with pytest.raises(ProfileError, match="expected one of front, columns"):
            parse_variant(wrong)


def test_bytes_are_those_that_memory_brings_within_the_exchange() -> None:
    machine = with_curves(curve(Order.FRONT, 8))
    per_us = machine.memory.bytes_per_s * 1e-6
    found = worth(machine, 4 * MIB / per_us + 1e-6)
    assert found is not None and (found.num_bytes, found.order, found.max_tokens) == (4 * MIB, Order.FRONT, 8)
    assert found.saved_us == pytest.approx(1.0 * (1 - machine.relative_error))
    half = worth(machine, 10 * MIB / per_us + 1e-6)
    assert half is not None and half.saved_us == pytest.approx(1.5 * (1 - machine.relative_error))
    # No more than was measured, and no more than there is.
    most, little = worth(machine, 1000.0), worth(machine, 1000.0, weights=4 * MIB)
    assert most is not None and most.num_bytes == 16 * MIB
    assert little is not None and little.num_bytes == 4 * MIB
    assert worth(machine, 0.5 * MIB / per_us) is None, "so few bytes were not measured"


def test_nothing_is_loaded_where_nothing_was_measured_or_gained() -> None:
    assert not is_measured(H200) and worth(H200, 100.0) is None
    machine = with_curves(curve(Order.FRONT, 8))
    assert is_measured(machine) and worth(machine, 100.0, tokens=9) is None
    assert prefetched(machine, 2, 8, 100.0, 64 * MIB, 4096) is None, "of other numbers of ranks nothing is known"
    assert worth(with_curves(curve(Order.FRONT, 8, (MIB, NOTHING_US))), 100.0) is None


def test_the_order_and_the_token_count_that_fit_best() -> None:
    better = tuple((size, 2 * us) for size, us in POINTS)
    machine = with_curves(curve(Order.FRONT, 64), curve(Order.FRONT, 8), curve(Order.COLUMNS, 64, *better))
    found = worth(machine, 100.0)
    assert found is not None and (found.order, found.max_tokens) == (Order.COLUMNS, 64)
    assert found.num_bytes % (128 * 4096) == 0, "equally many lines of every row"
    machine = with_curves(curve(Order.FRONT, 64), curve(Order.FRONT, 8))
    found = worth(machine, 100.0)
    assert found is not None and found.max_tokens == 8


def block(*weights: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    down, norm = torch.zeros(INNER, HIDDEN, dtype=torch.bfloat16), torch.ones(HIDDEN, dtype=torch.bfloat16)

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        rows = forms.rms(residual + forms.all_reduce(x @ down), norm)
        return (rows, *(torch.nn.functional.linear(rows, weight) for weight in weights))

    return run


def weight(rows: int, columns: int = HIDDEN) -> Tensor:
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


Reported = Callable[..., GraphReport]


@pytest.fixture
def report_on(tmp_path: Path) -> Reported:
    def run(machine: Machine, tokens: int, fn: Callable[..., object], static: bool = True) -> GraphReport:
        path = tmp_path / "machine.json"
        path.write_text(cost_model.dumps(machine))
        x, residual = (torch.zeros(1, tokens, size, dtype=torch.bfloat16) for size in (INNER, HIDDEN))
        known = {"world": WORLD, "machine": str(path), "device": "cuda", "force": (RULE,), "static": static}
        return previewed(fn, (x, residual), **known)  # type: ignore[arg-type]

    return run


def prefetching(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.weave.all_reduce_norm_prefetch.default)


@pytest.mark.parametrize("static", [True, False])
def test_the_operation_gets_the_weights_that_are_read_next(
    static: bool, report_on: Reported, graphs: list[fx.Graph]
) -> None:
    weights = weight(1536), weight(512), weight(256)
    (decision,) = report_on(with_curves(curve(Order.FRONT, 64)), 8, block(*weights), static=static).decisions
    parameters, terms = dict(decision.chosen.parameters), {t.name: t.us for t in decision.chosen.estimate.terms}
    assert parameters["prefetch_order"] == "front" and 0 < parameters["prefetch_bytes"] <= 16 * MIB
    assert terms["prefetched"] < 0.0
    assert any(note.startswith("prefetch: ") for note in decision.chosen.notes)
    (node,) = prefetching(graphs[-1])
    *_, given, text = node.args
    assert [tuple(tensor_of(each).shape) for each in given] == [tuple(each.shape) for each in weights]
    assert all(each.op in ("placeholder", "get_attr") for each in given), "nothing is copied for it"
    (call,) = calls(graphs[-1])
    assert call == decode(str(text))
    assert call.prefetch == Prefetch(int(parameters["prefetch_bytes"]), Order.FRONT, 64)
    # Each weight is still read by its GEMM alone beside it.
    for each in given:
        assert sum("aten" in str(user.target) for user in each.users) == 1


def test_the_candidate_without_a_measurement_is_as_it_was(report_on: Reported, graphs: list[fx.Graph]) -> None:
    (decision,) = report_on(H200, 8, block(weight(512))).decisions
    assert not any(name.startswith("prefetch") for name, _ in decision.chosen.parameters)
    assert not prefetching(graphs[-1]) and calls(graphs[-1])[0].prefetch is None


def of_computed_weights(x: Tensor, residual: Tensor) -> Tensor:
    rows, *_ = block()(x, residual)
    return torch.nn.functional.linear(rows, weight(512) * 2)


@pytest.mark.parametrize(
    ("tokens", "fn"),
    [(8192, block(weight(512))), (8, of_computed_weights), (8, block())],
    ids=["rows that come in bulk", "computed weights", "no GEMM behind it"],
)
def test_sites_that_load_nothing(
    tokens: int, fn: Callable[..., object], report_on: Reported, graphs: list[fx.Graph]
) -> None:
    (decision,) = report_on(with_curves(curve(Order.FRONT, 1 << 20)), tokens, fn).decisions
    assert decision.rewritten and not prefetching(graphs[-1]), decision.chosen


def inside(weights: list[Tensor], found: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Whether every row of every range lies within one of the weights."""
    ends = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in weights]
    for begin, pitch, rows, row_bytes in found:
        last = begin + (rows - 1) * pitch + row_bytes
        if not any(low <= begin and last <= high for low, high in ends):
            return False
    return True


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 100_000, 1 << 19, 1 << 30])
def test_ranges_never_leave_the_weights(order: Order, num_bytes: int) -> None:
    odd = torch.zeros(33 * 250 + 1).bfloat16()[1:].view(33, 250)
    weights = [weight(100, 512), odd, weight(7, 64)]
    found = ranges_of(weights, Prefetch(num_bytes, order, 8))
    assert inside(weights, found)
    loaded = sum(rows * row_bytes for _, _, rows, row_bytes in found)
    whole = sum(each.nbytes for each in weights)
    assert loaded <= min(num_bytes, whole)
    if num_bytes == 1 << 30:
        assert loaded == whole
    elif order is Order.FRONT:
        assert loaded == min(num_bytes, whole) and (not found or found[0][0] == weights[0].data_ptr())
    elif found:
        of_each = num_bytes // 140 // 128 * 128
        assert [row_bytes for *_, row_bytes in found] == [min(of_each, size) for size in (1024, 500, 128)]


def test_weights_that_are_no_plain_rows_are_left_alone() -> None:
    strided, empty, deep = weight(64, 32).t(), weight(0, 64), torch.zeros(2, 3, 4)
    plain = weight(4, 64)
    found = ranges_of([strided, empty, deep, plain], Prefetch(1 << 20, Order.FRONT, 8))
    assert found == ((plain.data_ptr(), plain.nbytes, 1, plain.nbytes),)


def test_a_call_keeps_what_is_prefetched() -> None:
    from tests.ops.test_all_reduce_norm_peer import make_call

    call: ReductionCall = make_call(prefetch=Prefetch(4096, Order.COLUMNS, 16))
    assert decode(call.encode()) == call and decode(make_call().encode()).prefetch is None
