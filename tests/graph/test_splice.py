"""Nodes that a rewrite inserts follow the nodes that they read."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from weaveopt.rewrites.reduction.splice import summed


def test_residuals_of_symbolic_sizes_are_summed_in_the_shape_of_the_first() -> None:
    """The view of the second reads sizes that become nodes after the first."""

    def compute(first: Tensor, rows: Tensor) -> Tensor:
        return first.sin().flatten(0, 1) + rows.cos()

    inputs = [torch.randn(3, 5, 8), torch.randn(15, 8)]
    graph = make_fx(compute, tracing_mode="symbolic")(*inputs).graph
    nodes = {node.target: node for node in graph.nodes}
    rows = nodes[torch.ops.aten.cos.default]
    first = nodes[torch.ops.aten.sin.default]
    first.prepend(rows)  # the value that sets the shape comes last
    total = summed(graph, (first, rows))
    assert isinstance(total, fx.Node) and total.target is torch.ops.aten.add.Tensor
    graph.lint()
