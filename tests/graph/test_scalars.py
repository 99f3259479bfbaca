"""A norm's eps and a residual's scale that are floats of the program: numbers under a guard, never a stale value."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives
import torch.fx as fx
from torch import Tensor, nn

import weaveopt
from tests.graphs import forms
from tests.graphs.executing import FORCED, executing, without_code
from tests.graphs.generating import build
from tests.graphs.nonempty import some
from tests.graphs.preview import FORCED as RULE
from tests.graphs.preview import previewed
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt.records.report import GraphReport
from weaveopt.rewrites import RULES
from weaveopt.sites.shared.epilogue import Reduced, follow

c10d = torch.ops._c10d_functional


class Norm(nn.Module):
    """eps as Hugging Face keeps it, an attribute. The factor is a float too, but no rewrite takes it as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(forms.make_weights(torch.float32).norm), 1e-6

    def forward(self, x: Tensor, factor: float = 1.5) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * y.to(x.dtype)) * factor


class DefaultNorm(Norm):
    """eps as the default of an argument."""

    def forward(self, x: Tensor, factor: float = 1.5, eps: float = 1e-5) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return (self.weight * y) * factor


class Block(nn.Module):
    """`residual + all_reduce(x @ product) * residual_multiplier`, and then a norm (Granite's layers)."""

    def __init__(self, norm: type[Norm] = Norm, scale: float = 0.22) -> None:
        super().__init__()
        self.product = nn.Parameter(forms.make_weights(torch.float32).product)
        self.norm, self.residual_multiplier = norm(), scale

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + forms.all_reduce(x @ self.product) * self.residual_multiplier
        return self.norm(total), total


def _inputs(rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, tokens, forms.INNER, generator=torch.Generator().manual_seed(rank))
    return x, torch.randn(2, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(("norm", "eps"), [(Norm, "1e-06"), (DefaultNorm, "1e-05")])
def test_floats_of_the_program_are_numbers(norm: type[Norm], eps: str) -> None:
    (decision,) = previewed(Block(norm), _inputs(0, 5), dynamic=True).decisions
    assert decision.rewritten
    assert decision.site.description == f"(all_reduce(partial)) * scale + residual -> rms_norm(eps={eps})"


def _tensor_eps(w: forms.Weights, x: Tensor, r: Tensor, eps: Tensor) -> Tensor:
    total = r + forms.all_reduce(x @ w.product)
    return w.norm * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps))


def _tensor_eps_of_a_layer_norm(w: forms.Weights, x: Tensor, r: Tensor, eps: Tensor) -> Tensor:
    total = r + forms.all_reduce(x @ w.product)
    centered = total - total.mean(-1, keepdim=True)
    return w.norm * (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps))


def _item_eps(w: forms.Weights, x: Tensor, r: Tensor, eps: Tensor) -> Tensor:
    return _tensor_eps(w, x, r, eps * 2)


@pytest.mark.parametrize("form", [_tensor_eps, _tensor_eps_of_a_layer_norm, _item_eps], ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_norm_whose_eps_is_a_tensor_stays_in_the_graph(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Dynamo has a symbol for every float64 tensor without dimensions: only those that it made itself are numbers."""
    weights = forms.make_weights(torch.float32)
    inputs = (*_inputs(0, 5), torch.tensor(1e-6, dtype=dtype))
    (decision,) = previewed(lambda x, r, eps: form(weights, x, r, eps), inputs).decisions
    assert decision.site.rejections == () and decision.rewritten
    assert "no norm: the norm's eps is a tensor" in decision.site.description
    assert ("has_norm", False) in decision.site.facts


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_on_another_device_is_no_part_of_the_site(device: str) -> None:
    """A GEMM's result may be scaled by a tensor of the host; the kernel reads the scale where the rows are."""
    graph, rows = fx.Graph(), torch.empty(3, 8, device="meta")
    partial, scale = graph.placeholder("partial"), graph.placeholder("scale")
    reduced = graph.call_function(c10d.all_reduce.default, (partial, "sum", "0"))
    wait = graph.call_function(c10d.wait_tensor.default, (reduced,))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (wait, scale))
    graph.output((scaled,))
    for node in (partial, reduced, wait, scaled):
        node.meta["val"] = rows
    scale.meta["val"] = torch.empty((), device=device)
    found = follow(reduced, {})
    assert isinstance(found, Reduced) and found.without_norm is not None
    taken_in = device == rows.device.type
    assert (found.total, found.scale_tensor) == ((scaled, scale) if taken_in else (wait, None))
    assert found.without_norm.code == ("no_norm_follows" if taken_in else "device_changes")


CALLS: tuple[tuple[int, float, float], ...] = (
    (5, 1e-6, 0.22), (7, 1e-6, 0.22), (7, 0.75, 0.22), (5, 1e-6, 0.22), (6, 0.75, 0.22), (6, 0.75, 3.0), (9, 0.75, 0.22)
)  # fmt: skip
"""Tokens, eps, scale of what is added to the residual."""
NUM_COMPILED = 3
"""Different pairs of eps and scale among them."""


def _calls(block: Block, compiled: Callable[..., tuple[Tensor, Tensor]], rank: int, training: bool) -> None:
    """Every call against eager, with its floats set before; gradients too, where there are any."""
    for tokens, eps, scale in CALLS:
        block.norm.variance_epsilon, block.residual_multiplier = eps, scale
        x, residual = _inputs(rank, tokens)
        found = []
        for fn in (block, compiled):
            block.zero_grad()
            with torch.set_grad_enabled(training):
                normed, total = fn(x, residual)
                if training:
                    normed.square().sum().backward()
            found.append((normed, total, *(p.grad for p in block.parameters() if p.grad is not None)))
        for want, got in zip(*found, strict=True):
            assert_close(got.detach(), want.detach(), LIBRARY, f"{tokens} tokens, eps {eps}, scale {scale}")


def _recompiled(rank: int, training: bool) -> list[tuple[str, str, bool]]:
    reports: list[GraphReport] = []
    block = Block()
    _calls(block, torch.compile(block, backend=executing(FORCED, reports), dynamic=True), rank, training)
    return [
        (r.phase, r.decisions[0].site.description.split("eps=")[-1], r.num_rewritten > 0)
        for r in reports
        if r.decisions
    ]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_another_value_is_compiled_again_and_right(training: bool) -> None:
    found, other = run_ranks(_recompiled, 2, training, timeout_s=300)
    assert found == other
    phase = "forward" if training else "prefill"
    assert [row for row in found if row[0] == phase] == [
        (phase, "1e-06)", True), (phase, "0.75)", True), (phase, "0.75)", True),
    ]  # fmt: skip


def _through_inductor(rank: int, folder: str) -> tuple[int, int, int]:
    """Graphs, and the hits and misses of Inductor's graph cache in a fresh process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"  # of a folder for both, one finds what the other made
    from torch._dynamo.utils import counters

    import weaveopt

    block = Block()
    options = {"force": list(RULE), "strict": True, "timeout_s": 30.0, "max_tokens": 256}
    compiled = torch.compile(block, backend="weave", options=options, dynamic=True)  # type: ignore[call-overload]
    _calls(block, compiled, rank, training=False)
    graphs = weaveopt.report().graphs
    assert all(graph.num_rewritten == 1 for graph in graphs)
    return len(graphs), counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


def test_a_warm_cache_keeps_values_apart(tmp_path: object) -> None:
    assert (
        run_ranks(_through_inductor, 2, str(tmp_path), timeout_s=300, own=True) == [(NUM_COMPILED, 0, NUM_COMPILED)] * 2
    )
    assert (
        run_ranks(_through_inductor, 2, str(tmp_path), timeout_s=300, own=True) == [(NUM_COMPILED, NUM_COMPILED, 0)] * 2
    )


def _left(rank: int) -> int:
    """With the rule off nothing needs a number: one graph serves every value."""
    import weaveopt

    block = Block()
    options = {"disable": list(RULES.names), "strict": True}
    compiled = torch.compile(block, backend="weave", options=options, dynamic=True)  # type: ignore[call-overload]
    _calls(block, compiled, rank, training=False)
    return len(weaveopt.report().graphs)


def test_what_is_left_takes_any_value() -> None:
    assert run_ranks(_left, 2, timeout_s=300) == [1, 1]


FLOATS_OPTIONS = {"force": ["causal_attention", "moe_fused"], "max_tokens": 256}
FLOATS = {
    "gemma2": (("attn_logit_softcapping", 0.5, "attention"),),
    "gpt_oss": (("scaling", 2.0, "attention"), ("alpha", 0.3, "mixture")),
}
"""Attributes of modules by family, another value of each, and the kind of the sites that read it."""


@pytest.mark.parametrize("family", FLOATS)
def test_floats_of_attention_and_experts(family: str) -> None:
    """With symbolic sizes every float that a module reads is an input of the graph: sites are found as without, and a
    rewrite that took one as a number is not run with another."""
    torch._dynamo.reset()
    model = build(family, num_hidden_layers=1 if family == "gemma2" else 2)
    compiled = torch.compile(model, backend="weave", dynamic=True, options=FLOATS_OPTIONS)
    ids = torch.arange(34).view(2, 17) % 90 + 3
    with torch.no_grad(), without_code():
        after = model(ids).logits
        assert_close(compiled(ids).logits, after, LIBRARY)
        [graph] = weaveopt.report(compiled).graphs
        for name, value, kind in some(FLOATS[family]):
            sites = [each for each in graph.decisions if each.site.kind == kind]
            owners = [module for module in model.modules() if hasattr(module, name)]
            assert len(sites) == len(owners) > 0 and not any(each.site.rejections for each in sites)
            for owner in owners:
                setattr(owner, name, value)
            num_graphs = weaveopt.report(compiled).num_graphs
            before, after = after, model(ids).logits
            assert not torch.allclose(before, after, atol=1e-2)
            assert_close(compiled(ids).logits, after, LIBRARY)
            if kind == "mixture":
                assert all(each.rewritten for each in sites) and weaveopt.report(compiled).num_graphs == num_graphs + 1
