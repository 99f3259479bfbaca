"""Gathers and scatters that resemble rewritten ones: they compute what they did, or are left with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.graphs.capturing import captured, codes, sites_in
from tests.graphs.functional_collectives import all_gather_single, reduce_scatter_single
from tests.graphs.preview import fake_group
from tests.graphs.rewriting import Rewritten, check_rewritten

WORLD = 2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_group(WORLD), torch.no_grad():
        yield


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return all_gather_single(x, dim, dist.group.WORLD)


def scatter(x: Tensor, dim: int = 0) -> Tensor:
    return reduce_scatter_single(x, "sum", dim, dist.group.WORLD)


def rewritten(fn: Callable[..., object], *inputs: Tensor) -> Rewritten:
    [graph] = captured(fn, *inputs)
    return check_rewritten(graph, WORLD)


@pytest.mark.parametrize("again", [False, True], ids=["one gather", "two gathers"])
def test_a_weight_that_is_computed_from_the_gathered_rows(again: bool) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        shard = x.sin()
        whole = gather(shard)
        other = gather(shard) if again else whole
        return whole @ w, other @ whole.relu().t()

    done = rewritten(fn, torch.zeros(4, 8), torch.zeros(8, 6))
    assert (done.num_rewritten, done.codes) == (0, ("operand_not_ready",))


@pytest.mark.parametrize("sizes", [(1, 4, 8), (2, 4, 8), (4, 8), (1, 1, 4, 8)])
def test_rows_that_are_added_before_the_scatter(sizes: tuple[int, ...]) -> None:
    """Rows of one sequence have a batch of one, and are no single row that is added to all."""

    def fn(x: Tensor, w: Tensor, added: Tensor) -> Tensor:
        return scatter(x @ w + added, x.ndim - 2)

    done = rewritten(fn, torch.zeros(sizes), torch.zeros(8, 8), torch.zeros(sizes))
    assert (done.num_rewritten, done.codes) == (1, ())


def _gathering(x: Tensor, w: Tensor) -> Tensor:
    return gather(x.sin()) @ w


def _scattering(x: Tensor, w: Tensor) -> Tensor:
    return scatter(x @ w)


@pytest.mark.parametrize("fn", [_gathering, _scattering])
def test_rows_of_a_symbolic_size(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A weight that is no parameter has symbolic sizes in a graph that is compiled for all of them."""
    x, w = torch.zeros(4, 8), torch.zeros(8, 6)
    [graph] = captured(fn, x, w, dynamic=True)
    [site] = sites_in(graph, WORLD)
    assert "shape_not_known" in codes(site)
    [graph] = captured(fn, x, w)
    [site] = sites_in(graph, WORLD)
    assert codes(site) == []
