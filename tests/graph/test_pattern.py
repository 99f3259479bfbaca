"""The pattern language: captures, commuting, alternatives, and the reason of a failed match."""

from __future__ import annotations

import torch
import torch.fx as fx

from weaveopt.graph.pattern import (
    Any,
    Equal,
    Mismatch,
    Number,
    OneOf,
    add,
    aten,
    call,
    is_rounding,
    item,
    mul,
    skip_casts,
)


def traced() -> tuple[fx.Node, ...]:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    square = graph.call_function(aten.pow.Tensor_Scalar, (x, 2))
    shifted = graph.call_function(aten.add.Tensor, (square, 1e-6))
    product = graph.call_function(aten.mul.Tensor, (y, shifted))
    return x, y, square, shifted, product


def test_scalars_and_nodes_are_captured_in_either_order() -> None:
    x, y, _, _, product = traced()
    pattern = mul(add(call(aten.pow.Tensor_Scalar, Any("x"), Equal(2)), Number("eps")), Any("y"))
    assert pattern.match(product, {}) == {"x": x, "y": y, "eps": 1e-6}


def test_a_name_stands_for_one_node() -> None:
    _, _, _, _, product = traced()
    result = mul(Any("a"), Any("a")).match(product, {})
    assert isinstance(result, Mismatch) and "a = placeholder y again" in result.expected


def test_the_deepest_reason_is_kept() -> None:
    _, _, _, shifted, _ = traced()
    pattern = OneOf(
        (call(aten.sin.default, Any("x")), add(call(aten.pow.Tensor_Scalar, Any("x"), Equal(3)), Number("e")))
    )
    result = pattern.match(shifted, {})
    assert isinstance(result, Mismatch)
    assert result.expected == "3" and result.found == "2" and result.depth == 2
    assert str(result) == "at 2: expected 3, found 2"


def test_a_number_is_no_flag_and_no_node() -> None:
    x, *_ = traced()
    assert isinstance(Number("n").match(True, {}), Mismatch)
    assert isinstance(Number("n").match(x, {}), Mismatch)


def test_a_sum_with_a_factor_is_another_one() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    twice = graph.call_function(aten.add.Tensor, (x, 1e-6), {"alpha": 2})
    result = add(Any("x"), Number("eps")).match(twice, {})
    assert isinstance(result, Mismatch) and result.found == "alpha 2"


def test_casts_that_round_are_those_between_wide_floats() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")

    def cast(source: fx.Node, dtype: torch.dtype) -> fx.Node:
        node = graph.call_function(torch.ops.prims.convert_element_type.default, (source, dtype))
        node.meta["val"] = torch.empty(4, dtype=dtype)
        return node

    x.meta["val"] = torch.empty(4)
    half = cast(cast(x, torch.bfloat16), torch.float32)
    assert skip_casts(half) is x and is_rounding(half) and not is_rounding(x)
    for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
        narrow = cast(x, dtype)
        wide = cast(narrow, torch.float32)
        assert skip_casts(wide) is wide and not is_rounding(wide) and not is_rounding(narrow), dtype


def test_items_of_several_results() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(aten.var_mean.correction, (x, [2]))
    import operator

    mean = graph.call_function(operator.getitem, (both, 1))
    assert item(Any("both"), 1).match(mean, {}) == {"both": both}
    assert isinstance(item(Any("both"), 0).match(mean, {}), Mismatch)
    assert torch.ops.aten.var_mean.correction is both.target
