"""Rows that GEMMs of one row read are stored once, whatever they are computed from."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from weaveopt.inductor.one_row_gemm import STORE, store_rows


def product(x: Tensor, weight: Tensor) -> Tensor:
    """As torch decomposes it: accumulated in fp32."""
    return (x.float()[:, :, None] * weight.t().float()[None]).sum(1).to(x.dtype)


def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return product(F.silu(product(x, gate)) * product(x, up), down)


def weights(*shapes: tuple[int, int]) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=numbers).bfloat16() for shape in shapes)


def traced(function: Callable[..., object], *given: Tensor) -> fx.GraphModule:
    return make_fx(function, select_decomp_table())(*given)


def stored_in(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=STORE)


def test_what_is_computed_is_stored_once_and_inputs_are_not() -> None:
    given = weights((1, 8), (12, 8), (12, 8), (8, 12))
    module = traced(block, *given)
    assert store_rows(module.graph) == 1, "the input is in memory already"
    module.graph.lint()
    (stored,) = stored_in(module.graph)
    assert stored.meta["val"].shape == (1, 12) and stored.meta["val"].dtype == torch.bfloat16
    module.recompile()
    assert torch.equal(module(*given), block(*given))


def test_one_row_that_several_products_read_is_stored_once() -> None:
    def two(x: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.tanh(x) * 2
        return product(row, one), product(row, other)

    given = weights((1, 8), (12, 8), (4, 8))
    module = traced(two, *given)
    assert store_rows(module.graph) == 1
    assert all(node.target is not STORE for stored in stored_in(module.graph) for node in stored.users)
    module.recompile()
    for found, wanted in zip(module(*given), two(*given), strict=True):
        assert torch.equal(found, wanted)


def test_several_rows_and_other_sums_are_left_alone() -> None:
    given = weights((2, 8), (12, 8), (12, 8), (8, 12))
    assert store_rows(traced(block, *given).graph) == 0

    def sums(x: Tensor) -> Tensor:
        return (torch.sin(x)[:, :, None] * x[:, None]).sum(1) + (x * 2).sum()

    assert store_rows(traced(sums, torch.randn(3, 4)).graph) == 0


def test_symbols_are_neither_asked_nor_taken_for_one() -> None:
    """A guard on a size would compile the model again for each."""

    def scaled(x: Tensor) -> Tensor:
        return (torch.sin(x)[:, :, None] * x.shape[0]).sum(1) + (torch.sin(x)[:, :, None] * x[:, :, None]).sum(1)

    module = make_fx(scaled, select_decomp_table(), tracing_mode="symbolic")(torch.randn(3, 4))
    guards = len(module.shape_env.guards)
    assert store_rows(module.graph) == 0 and len(module.shape_env.guards) == guards
