"""Mixtures in the graphs of transformers' experts: every family and form, and what is no mixture that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from tests.graphs.capturing import captured, context_of
from tests.graphs.mixtures import EXPERTS, FAMILIES, FORMS, HIDDEN, WIDTH, Family, experts_of, routed
from weaveopt.records.candidate import Rejection
from weaveopt.rule import FoundSite
from weaveopt.sites.mixture.activation import Between, activation_of, between
from weaveopt.sites.mixture.matcher import MixtureFacts, MixtureMatcher

aten = torch.ops.aten
ACTIVATIONS = {
    "olmoe": "gelu(gate) * up",
    "granitemoe": "gelu_tanh(gate) * up",
    "ernie4_5_moe": "relu(gate) * up",
    "gpt_oss": "clamped_swish(gate, alpha=1.702, limit=7) * (up + 1)",
    "nemotron_h": "relu_squared(z)",
    "deepseek_v4": "silu(gate, limit=1.5) * up",
}
BF16 = torch.bfloat16
MIXTRAL = FAMILIES[0]


def found_in(fn: Callable[..., object], *inputs: object, dynamic: bool = False) -> list[FoundSite]:
    with torch.no_grad():
        (graph,) = captured(fn, *inputs, dynamic=dynamic)
    return list(MixtureMatcher().find(graph.graph, context_of(graph.groups, 1)))


def facts_in(fn: Callable[..., object], *inputs: object, dynamic: bool = False) -> MixtureFacts:
    (site,) = found_in(fn, *inputs, dynamic=dynamic)
    assert not site.site.rejections, site.site.rejections
    return cast(MixtureFacts, site.facts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family(family: Family, form: str) -> None:
    facts = facts_in(experts_of(family, form, BF16), *routed(7, 2, BF16, torch.float32, remote=False))
    assert (facts.experts, facts.choices, facts.hidden, facts.width) == (EXPERTS, 2, HIDDEN, WIDTH)
    assert (facts.form, facts.dtype, facts.weights_dtype) == (form, "bfloat16", "float32")
    assert str(facts.activation) == ACTIVATIONS.get(family.name, "silu(gate) * up")
    assert facts.activation.interleaved == facts.has_biases == (family.name == "gpt_oss")
    assert not facts.has_remote_experts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_choices_of_other_ranks(name: str, form: str) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    facts = facts_in(experts_of(family, form, BF16, remote=True), *routed(7, 2, BF16, BF16, remote=True))
    assert facts.has_remote_experts and facts.weights_dtype == "bfloat16"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 3), (6, 1), (5, 4)])
def test_sizes(form: str, tokens: int, choices: int) -> None:
    inputs = routed(tokens, choices, torch.float32, torch.float32, remote=False)
    facts = facts_in(experts_of(MIXTRAL, form, torch.float32), *inputs)
    assert (facts.choices, facts.experts) == (choices, EXPERTS)


@pytest.mark.parametrize("form", FORMS)
def test_symbolic_token_count(form: str) -> None:
    experts, router = experts_of(MIXTRAL, form, BF16), torch.randn(EXPERTS, HIDDEN).to(BF16)

    def block(x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, router).topk(2)
        return experts(x, chosen, weights)

    (site,) = found_in(block, torch.randn(9, HIDDEN).to(BF16), dynamic=True)
    assert not site.site.rejections and site.facts is not None
    assert (site.site.tokens.hint, site.site.tokens.is_static) == (9, False)


def test_layers_are_sites_of_their_own() -> None:
    experts, (x, chosen, weights) = experts_of(MIXTRAL, "grouped_mm", BF16), routed(7, 2, BF16, BF16, remote=False)

    def layers(x: Tensor) -> Tensor:
        return experts(x + experts(x, chosen, weights), chosen, weights)

    sites = found_in(layers, x)
    assert len(sites) == 2 and sites[0].facts == sites[1].facts and not sites[0].nodes & sites[1].nodes


def test_router_is_told() -> None:
    """Grouped sigmoid scores as DeepSeek's, and a softmax of what was chosen as in gpt-oss."""
    experts, x = experts_of(MIXTRAL, "grouped_mm", BF16), torch.randn(7, HIDDEN).to(BF16)
    router = torch.randn(EXPERTS, HIDDEN).to(BF16)

    def softmax_first(x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, router).float().softmax(-1).topk(2)
        return experts(x, chosen, weights)

    def softmax_last(x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, router).topk(2)
        return experts(x, chosen, weights.softmax(-1))

    def sigmoid(x: Tensor) -> Tensor:
        scores = F.linear(x, router).float().sigmoid()
        chosen = (scores + 0.5).topk(2).indices
        return experts(x, chosen, scores.gather(1, chosen))

    found = [facts_in(each, x) for each in (softmax_first, softmax_last, sigmoid)]
    assert [each.scores for each in found] == ["softmax", "softmax of the chosen", "sigmoid"]
    assert {each.experts_in_all for each in found} == {EXPERTS}


# --- what is no mixture that is known --------------------------------------------------------------------------------


def test_an_unknown_activation_is_named() -> None:
    experts = experts_of(MIXTRAL, "grouped_mm", BF16)
    experts.act_fn = torch.nn.Softsign()
    (site,) = found_in(experts, *routed(7, 2, BF16, BF16, remote=False))
    assert [each.code for each in site.site.rejections] == ["activation_not_known"]
    assert "abs" in str(dict(site.site.rejections[0].values)["ops"])


class _Rounded(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x).to(torch.float8_e4m3fn).to(x.dtype)


def test_an_activation_rounded_to_few_values_is_another_one() -> None:
    experts = experts_of(MIXTRAL, "grouped_mm", BF16)
    experts.act_fn = _Rounded()
    (site,) = found_in(experts, *routed(7, 2, BF16, BF16, remote=False))
    assert [each.code for each in site.site.rejections] == ["activation_not_known"]
    assert "more than rounding" in site.site.rejections[0].message


@pytest.mark.parametrize(
    ("places", "taken"), [("before", True), ("less", False), ("doubled", False), ("behind", False)]
)
def test_biases_are_added_to_the_rows_of_the_first_gemm(places: str, taken: bool) -> None:
    graph = fx.Graph()

    def node(target: object, *args: object, width: int = 8, **named: object) -> fx.Node:
        made = graph.call_function(target, args, named)  # type: ignore[arg-type]
        made.meta["val"] = torch.empty(3, width)
        return made

    first, table, ids = (graph.placeholder(name) for name in ("first", "table", "ids"))
    first.meta["val"] = torch.empty(3, 8)
    bias = node(aten.index.Tensor, table, [ids])
    rows = first
    if places in ("before", "doubled"):
        rows = node(aten.add.Tensor, first, bias, **({"alpha": 2} if places == "doubled" else {}))
    elif places == "less":
        rows = node(aten.sub.Tensor, first, bias)
    last = node(aten.pow.Tensor_Scalar, node(aten.relu.default, rows), 2)
    if places == "behind":
        last = node(aten.add.Tensor, last, bias)
    found = between(first, last)
    assert isinstance(found, Between) and found.biases == (bias,)
    assert isinstance(activation_of(found), Rejection) is not taken


def test_a_norm_behind_the_experts_is_refused() -> None:
    experts = experts_of(MIXTRAL, "grouped_mm", BF16)
    experts.has_post_expert_norm = True  # type: ignore[assignment]
    experts.post_expert_norm = torch.nn.RMSNorm(HIDDEN, dtype=BF16)
    (site,) = found_in(experts, *routed(7, 2, BF16, BF16, remote=False))
    assert [each.code for each in site.site.rejections] == ["form_not_known"] and site.facts is None


@pytest.mark.parametrize("cut", ["", "both", "first"])
def test_ids_that_are_cut_without_a_mask(cut: str) -> None:
    """An id beyond the last expert then means the last one: both GEMMs read what is cut as it is, or none does."""
    up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)

    def batched(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids = chosen.reshape(-1)
        within = ids.clamp(0, EXPERTS - 1) if cut else ids
        gate, wide = torch.bmm(up[within], x.repeat_interleave(2, dim=0).unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        made = torch.bmm(down[ids if cut == "first" else within], (F.silu(gate) * wide).unsqueeze(-1)).squeeze(-1)
        return (made * weights.reshape(-1, 1)).view(-1, 2, HIDDEN).sum(1)

    (site,) = found_in(batched, *routed(7, 2, torch.float32, torch.float32, remote=False))
    assert [each.code for each in site.site.rejections] == (["form_not_known"] if cut == "first" else [])


@pytest.mark.parametrize("grouped", [True, False])
def test_one_grouped_gemm_is_no_mixture(grouped: bool) -> None:
    """It says so where it is alone; batched GEMMs are everywhere, and only those of gathered weights count."""
    weight, ends = torch.randn(3, 16, 32).to(BF16), torch.tensor([8, 16, 24], dtype=torch.int32)

    def one(x: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, ends) if grouped else torch.bmm(x.view(3, 8, 16), weight)

    sites = found_in(one, torch.randn(24, 16).to(BF16))
    assert [each.code for site in sites for each in site.site.rejections] == (["form_not_known"] if grouped else [])


def test_rows_that_others_read_stay() -> None:
    experts = experts_of(MIXTRAL, "grouped_mm", BF16)
    seen: list[Tensor] = []
    gate = experts._apply_gate

    def spying(rows: Tensor) -> Tensor:
        seen.append(gate(rows))
        return seen[-1]

    experts._apply_gate = spying  # type: ignore[assignment]

    def compute(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        seen.clear()
        return experts(*inputs), seen[-1]

    (site,) = found_in(compute, *routed(7, 2, BF16, BF16, remote=False))
    assert [each.code for each in site.site.rejections] == ["read_by_others"]


def test_training_keeps_what_its_backward_pass_reads() -> None:
    experts = experts_of(MIXTRAL, "grouped_mm", BF16)
    forward, *_ = captured(experts, *routed(7, 2, BF16, BF16, remote=False))
    sites = MixtureMatcher().find(forward.graph, context_of(forward.groups, 1))
    assert [each.code for site in sites for each in site.site.rejections] == ["read_by_others"]
