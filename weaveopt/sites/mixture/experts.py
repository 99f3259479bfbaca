"""The experts of one mixture in a graph, by role."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from weaveopt.ops.experts.activation import Activation


@dataclass(frozen=True)
class Linear:
    """The weights of one projection of all experts."""

    weight: fx.Node
    """[experts, out, in], or [experts, in, out] where it is `transposed`."""
    transposed: bool
    bias: fx.Node | None = None
    """[experts, out]"""


@dataclass(frozen=True)
class Experts:
    """The experts of one mixture in a graph, by role."""

    form: str
    """`grouped_mm` or `batched_mm`, as transformers calls them."""
    x: fx.Node
    """[tokens, hidden]"""
    experts: fx.Node
    """The experts that each token chose, tokens * choices of them."""
    weights: fx.Node
    """Weights of the choices, one for each."""
    num_choices: int
    up: Linear
    down: Linear
    activation: Activation
    output: fx.Node
    """[tokens, hidden]"""
    has_remote_experts: bool = False
    """True if choices of experts that this rank does not store are masked."""
    numbers: tuple[torch.SymFloat, ...] = ()
    """Floats of the program in the activation, which has them as the numbers they are in this call."""
    nodes: frozenset[fx.Node] = frozenset()
    """Nodes from the operands above up to and including `output`; some may have other consumers too."""
