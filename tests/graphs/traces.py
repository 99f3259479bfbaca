"""Graphs as `capture` gives them, traced in one process without a compiler; and the steps of the decision on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs import forms
from tests.graphs.preview import fake_group
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.fabrics import topology
from weaveopt.inductor.seams import GraphPass
from weaveopt.pipeline.capture import capture
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.pipeline.recognize import recognize
from weaveopt.rewrites import RULES
from weaveopt.rule import CapturedGraph, Context, RuleSet


def traced(
    fn: Callable[..., object], shapes: Sequence[Sequence[int]], world: int = 2, dtype: torch.dtype = torch.bfloat16
) -> CapturedGraph:
    """The graph of `fn` on tensors of these shapes."""
    with FakeTensorMode(), fake_group(world), torch.no_grad():
        module = make_fx(fn, tracing_mode="fake")(*(torch.empty(*shape, dtype=dtype) for shape in shapes))
    return capture(module, "graph", GraphPass.INFERENCE)


def traced_chain(inner: Sequence[int], tokens: int = 64, hidden: int = 1024, world: int = 2) -> CapturedGraph:
    """A site for each `k` in `inner`, `[tokens, k] @ [k, hidden]`, each the residual of the next."""

    def chain(x: Tensor, total: Tensor, norm: Tensor, *products: Tensor) -> Tensor:
        for into, out_of in zip(products[::2], products[1::2], strict=True):
            total = total + forms.all_reduce(x @ into)
            x = forms.rms(total, norm) @ out_of
        return x

    following = (*inner[1:], inner[-1])
    products = [shape for k, n in zip(inner, following, strict=True) for shape in ((k, hidden), (hidden, n))]
    return traced(chain, [(tokens, inner[0]), (tokens, hidden), (hidden,), *products], world)


def context_of(captured: CapturedGraph, machine: Machine, world: int = 2, **settings: object) -> Context:
    group = topology.fake(world, device=machine.device)
    return Context(Config(**settings), machine, dict.fromkeys(captured.groups, group))  # type: ignore[arg-type]


def framed(captured: CapturedGraph, context: Context, rules: RuleSet = RULES) -> ProblemTemplate:
    """Its sites, recognized."""
    return ProblemTemplate(captured, recognize(captured, rules, context), rules, context)
