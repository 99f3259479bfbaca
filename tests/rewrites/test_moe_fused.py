"""The rule `moe_fused` on CPU ranks: results as eager's in every form, prices, and what it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from tests.graphs.executing import executing
from tests.graphs.mixtures import EXPERTS, FAMILIES, FORMS, HIDDEN, Family, experts_of, routed
from tests.graphs.preview import previewed
from tests.graphs.tolerances import KERNEL, assert_close
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.cost_model.machine import KernelCurve, Machine, SizePoint
from weaveopt.cost_model.mixture import LEAST_ROWS, OVERLAPS, WIDE, Mixture, kernels_us
from weaveopt.inductor.kernels import KernelContext
from weaveopt.ops.experts.activation import Activation
from weaveopt.ops.experts.call import ExpertsKernel, decode
from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import Decision, GraphReport
from weaveopt.records.site import TokenCounts
from weaveopt.records.skew import UNIFORM, Skew
from weaveopt.rewrites.moe_fused.candidates import HOPPER, KERNELS, ONE, RULE, Host, candidates, mixture_of
from weaveopt.sites.mixture.matcher import MixtureFacts

FORCED = Config(force=(RULE,), strict=True)
BF16, FP32 = torch.bfloat16, torch.float32
MIXTRAL = FAMILIES[0]
TRITON = Host(has_triton=True)
FACTS = MixtureFacts(
    experts=8,
    experts_in_all=8,
    choices=2,
    hidden=6144,
    width=8192,
    dtype="bfloat16",
    weights_dtype="float32",
    form="grouped_mm",
    activation=Activation("silu"),
    has_biases=False,
    has_remote_experts=False,
    scores="softmax",
    groups=0,
)


def ran(
    fn: Callable[..., object], inputs: list[Tensor], config: Config = FORCED, dynamic: bool = False
) -> tuple[Tensor, list[Decision]]:
    """The result under the backend, and what was decided at mixtures."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    with torch.no_grad():
        got = torch.compile(fn, backend=executing(config, reports), fullgraph=True, dynamic=dynamic)(*inputs)
    assert isinstance(got, Tensor) and not any(report.fallbacks for report in reports)
    return got, [each for report in reports for each in report.decisions if each.site.kind == "mixture"]


def reasons(decision: Decision) -> list[str]:
    return [reason.code for candidate in decision.alternatives for reason in candidate.rejections]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family_computes_as_eager(family: Family, form: str) -> None:
    for dtype, weights_dtype in ((FP32, FP32), (BF16, BF16), (BF16, FP32)):
        experts, inputs = experts_of(family, form, dtype), routed(7, 2, dtype, weights_dtype, remote=False)
        got, (decision,) = ran(experts, inputs)
        assert decision.chosen.choice == RULE and decision.chosen.variant == "by_expert"
        assert_close(got, experts(*inputs), KERNEL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_choices_of_other_ranks_add_nothing(name: str, form: str) -> None:
    family = next(each for each in FAMILIES if each.name == name)
    experts, inputs = experts_of(family, form, FP32, remote=True), routed(9, 2, FP32, FP32, remote=True)
    got, (decision,) = ran(experts, inputs)
    assert decision.rewritten
    assert_close(got, experts(*inputs), KERNEL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 3), (6, 1), (5, 4)])
def test_sizes(form: str, tokens: int, choices: int) -> None:
    experts, inputs = experts_of(MIXTRAL, form, FP32), routed(tokens, choices, FP32, FP32, remote=False)
    got, (decision,) = ran(experts, inputs)
    assert decision.rewritten
    assert_close(got, experts(*inputs), KERNEL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(1, -1), (-1, 1), (2, -1)], ids=str)
def test_choices_in_other_dimensions(form: str, sizes: tuple[int, int]) -> None:
    """Experts read choices and weights as one row of them, whatever dimensions they had."""
    experts, (x, chosen, weights) = experts_of(MIXTRAL, form, FP32), routed(6, 2, FP32, FP32, remote=False)

    def block(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return experts(x, chosen.view(6, 2), weights.view(6, 2))

    got, (decision,) = ran(block, [x, chosen.view(sizes), weights.view(sizes)])
    assert decision.rewritten
    assert_close(got, experts(x, chosen, weights), KERNEL)


@pytest.mark.parametrize("form", FORMS)
def test_symbolic_token_count(form: str) -> None:
    """One graph for several token counts."""
    experts, router = experts_of(MIXTRAL, form, FP32), torch.randn(EXPERTS, HIDDEN)

    def block(x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, router).softmax(-1).topk(2)
        return experts(x, chosen, weights)

    torch._dynamo.reset()
    reports: list[GraphReport] = []
    compiled = torch.compile(block, backend=executing(FORCED, reports), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (9, 4, 30):
            x = torch.randn(tokens, HIDDEN)
            assert_close(compiled(x), block(x), KERNEL)
    assert [decision.rewritten for report in reports for decision in report.decisions] == [True]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_old_form_stays(form: str, graphs: list[fx.Graph]) -> None:
    """Neither the sort nor gathered weights, nor anything that served them alone."""
    ran(experts_of(MIXTRAL, form, FP32), routed(7, 2, FP32, FP32, remote=False))
    (graph,) = graphs
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.weave.moe_experts.default]


def test_several_layers() -> None:
    experts, (x, chosen, weights) = experts_of(MIXTRAL, "grouped_mm", FP32), routed(7, 2, FP32, FP32, remote=False)

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + experts(x, chosen, weights)
        return x

    got, decisions = ran(layers, [x])
    assert [each.rewritten for each in decisions] == [True] * 3
    assert_close(got, layers(x), KERNEL)


def test_switched_off() -> None:
    experts, inputs = experts_of(MIXTRAL, "batched_mm", FP32), routed(7, 2, FP32, FP32, remote=False)
    _, (decision,) = ran(experts, inputs, Config(disable=(RULE,), strict=True))
    assert decision.chosen.choice == LEAVE and "disabled" in reasons(decision)


def test_an_activation_that_no_kernel_knows_is_left() -> None:
    experts, inputs = experts_of(MIXTRAL, "grouped_mm", FP32), routed(7, 2, FP32, FP32, remote=False)
    experts.act_fn = torch.nn.Softsign()
    got, (decision,) = ran(experts, inputs)
    assert not decision.rewritten
    assert_close(got, experts(*inputs), KERNEL)


# --- prices -----------------------------------------------------------------------------------------------------------


def _on(
    machine: Machine, tokens: int, facts: MixtureFacts = FACTS, transposed: bool = False, host: Host = TRITON
) -> list[tuple[str, float | None, list[str]]]:
    found = candidates(facts, transposed, TokenCounts(tokens), KernelContext(machine), host, usable_only=False)
    return [
        (each.variant, None if each.estimate is None else each.estimate.us, [r.code for r in each.rejections])
        for each in found
    ]


def test_weights_that_are_gathered_for_every_choice_cost_more() -> None:
    """Without being forced: `batched_mm` copies weights for every choice, the rule reads them once for every expert."""
    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=generator) * 0.1 for shape in ((4, 1024, 256), (4, 256, 512)))

    def batched(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.reshape(-1), x.repeat_interleave(2, dim=0)
        gate, wide = torch.bmm(up[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        made = torch.bmm(down[ids], (F.silu(gate) * wide).unsqueeze(-1)).squeeze(-1)
        return (made * weights.reshape(-1, 1)).view(-1, 2, 256).sum(1)

    weights, chosen = torch.rand(64, 4, generator=generator).topk(2)
    inputs = [torch.randn(64, 256, generator=generator), chosen, weights]
    got, (decision,) = ran(batched, inputs, Config(strict=True))
    assert decision.chosen.choice == RULE
    assert_close(got, batched(*inputs), KERNEL)


@pytest.mark.parametrize("biased", [False, True])
def test_ids_that_are_cut_keep_their_meaning(biased: bool) -> None:
    """transformers before 5.23 cuts ids of other ranks to the last expert, whose weight is zero then or is not."""
    generator = torch.Generator().manual_seed(0)
    up, down, bias = (torch.randn(shape, generator=generator) * 0.1 for shape in ((4, 64, 32), (4, 32, 32), (4, 64)))

    def batched(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, rows = chosen.reshape(-1).clamp(0, 3), x.repeat_interleave(2, dim=0)
        both = torch.bmm(up[ids], rows.unsqueeze(-1)).squeeze(-1)
        gate, wide = (both + bias[ids] if biased else both).chunk(2, -1)
        made = torch.bmm(down[ids], (F.silu(gate) * wide).unsqueeze(-1)).squeeze(-1)
        return (made * weights.reshape(-1, 1)).view(-1, 2, 32).sum(1)

    weights, chosen = torch.rand(16, 7, generator=generator).topk(2)
    inputs = [torch.randn(16, 32, generator=generator), chosen, weights]
    assert chosen.max() > 3
    got, (decision,) = ran(batched, inputs)
    assert decision.rewritten
    assert_close(got, batched(*inputs), KERNEL)


def test_kernels_that_were_not_measured_are_not_used() -> None:
    machine = replace(cost_model.load("h200x4"), kernels=())
    assert _on(machine, 8) == [
        (variant, None, [code])
        for variant, code in (
            (KERNELS, "not_measured"), (HOPPER, "few_rows"), (ONE, "few_rows"), (WIDE, "few_rows"),
        )
    ]  # fmt: skip
    assert [codes for *_, codes in _on(machine, 8192)] == [["not_measured"]] * 4


def test_kernels_take_weights_and_arithmetic_together() -> None:
    curves = (
        KernelCurve("x", "experts", "bfloat16 weights", "bytes", (SizePoint(1 << 20, 5.0), SizePoint(1 << 30, 300.0))),
        KernelCurve("x", "experts", "bfloat16 rows", "flop", (SizePoint(10**9, 4.0), SizePoint(10**13, 16000.0))),
    )
    machine = replace(cost_model.load("h200x4"), kernels=curves)
    few, many = (kernels_us(machine, Mixture(tokens, 2.0, 8, 6144, 8192, True, "bfloat16")) for tokens in (1, 8192))
    assert few is not None and many is not None and few < many
    (_, us, refused), (_, _, others), *_ = _on(machine, 8192)
    assert us is not None and us >= many and not refused and others == ["not_measured"]
    assert [each[2] for each in _on(machine, 8, replace(FACTS, dtype="float32"))] == [["dtype_not_supported"]] * 4
    tiny = kernels_us(machine, Mixture(1, 2.0, 8, 64, 64, True, "bfloat16"))
    assert tiny == pytest.approx(5.0), "less arithmetic than was measured takes less than the least that was"
    most = Mixture(1 << 20, 2.0, 64, 6144, 8192, True, "bfloat16")
    beyond = 300.0 * most.weight_bytes / (1 << 30), 16000.0 * most.flops / 1e13
    assert kernels_us(machine, most) == pytest.approx(math.hypot(*beyond))


def _curves(name: str, us: float) -> tuple[KernelCurve, KernelCurve]:
    points = (SizePoint(1 << 10, us), SizePoint(1 << 60, us))
    return (
        KernelCurve("x", "experts", f"{name}bfloat16 weights", "bytes", points),
        KernelCurve("x", "experts", f"{name}bfloat16 rows", "flop", points),
    )


def _both(us: float, power: float) -> float:
    """Time of a kernel whose reading and arithmetic take `us` each."""
    return 2.0 ** (1.0 / power) * us


def test_each_of_the_kernels_has_its_own_curves() -> None:
    machine = replace(cost_model.load("h200x4"), kernels=(*_curves("", 900.0), *_curves("hopper ", 500.0)))
    (triton, slow, _), (hopper, fast, _), *_ = _on(machine, 8192)
    assert (triton, hopper) == (KERNELS, HOPPER)
    assert (
        slow is not None
        and fast is not None
        and (slow, fast) == pytest.approx((_both(900.0, 2.0), _both(500.0, OVERLAPS["hopper"])))
    )
    assert [codes for *_, codes in _on(machine, 8192, transposed=True)] == [
        ["not_measured"], ["not_measured"], ["not_measured"], ["weight_layout"],
    ]  # fmt: skip
    both = replace(machine, kernels=(*machine.kernels, *_curves("hopper transposed ", 700.0)))
    (_, unknown, _), (_, turned, _), *_ = _on(both, 8192, transposed=True)
    assert unknown is None and turned is not None and turned == pytest.approx(_both(700.0, OVERLAPS["hopper"]))


def test_a_table_says_which_kernels_serve_which_counts() -> None:
    """The table follows the curves: kernels for few rows read weights faster, those for many multiply faster."""

    def curves(name: str, bytes_per_us: float, flops_per_us: float) -> tuple[KernelCurve, ...]:
        sizes = (1 << 20, 1 << 44)
        return tuple(
            KernelCurve(
                "x", "experts", f"{name} bfloat16 {kind}".strip(), counts, tuple(SizePoint(n, n / rate) for n in sizes)
            )
            for kind, counts, rate in (("weights", "bytes", bytes_per_us), ("rows", "flop", flops_per_us))
        )

    machine = replace(cost_model.load("h200x4"), kernels=(*curves("hopper", 2e6, 6e8), *curves("", 4e6, 1e8)))
    asked = TokenCounts(32, most=8192)
    found = tuple(candidates(FACTS, False, asked, KernelContext(machine), TRITON, usable_only=True))
    assert [each.variant for each in found] == [KERNELS, HOPPER]
    assert not found[1].table, "it is not what is chosen"
    few, many = found[0].table
    assert (few.variant, many.variant, many.max_tokens) == (KERNELS, HOPPER, 8192)

    def us(tokens: int) -> list[float]:
        return [kernels_us(machine, mixture_of(FACTS, False, tokens, UNIFORM), name) or 0.0 for name in ("", "hopper")]

    (before, above), (behind, below) = us(few.max_tokens), us(few.max_tokens + 1)
    assert before <= above and behind > below, "the table changes where the curves cross"
    assert not any(
        each.table
        for each in candidates(FACTS, False, TokenCounts(8), KernelContext(machine), TRITON, usable_only=True)
    )


def test_one_kernel_is_chosen_by_its_curves() -> None:
    """Two kernels are preferred unless the one is faster, in a table too. Without curves, and where experts have few
    rows, the one kernel is no choice."""
    two = replace(cost_model.load("h200x4"), kernels=(*_curves("", 900.0), *_curves("hopper ", 500.0)))
    asked = TokenCounts(8, most=16384)

    def fastest(machine: Machine) -> set[str]:
        found = candidates(FACTS, False, asked, KernelContext(machine), TRITON, usable_only=True)
        return {row.variant for each in found for row in each.table}

    one = {us: replace(two, kernels=(*two.kernels, *_curves("one_kernel ", us))) for us in (499.0, 500.0)}
    assert [fastest(two), fastest(one[499.0]), fastest(one[500.0])] == [
        {KERNELS, HOPPER}, {KERNELS, ONE}, {KERNELS, HOPPER},
    ]  # fmt: skip
    _, (_, hopper_us, _), (name, us, none), _ = _on(one[499.0], 8192)
    assert hopper_us is not None and us is not None and name == ONE and not none
    assert hopper_us - us == pytest.approx(_both(1.0, OVERLAPS[ONE]))
    assert _on(two, 8192)[2] == (ONE, None, ["not_measured"])
    least = LEAST_ROWS[ONE] * FACTS.experts // FACTS.choices
    assert [codes for *_, codes in _on(one[499.0], least - 1)] == [[], ["few_rows"], ["few_rows"], ["few_rows"]]
    assert [codes for *_, codes in _on(one[499.0], least)] == [[], [], [], ["few_rows"]]


def test_kernels_for_many_rows_an_expert() -> None:
    """They are no choice for few, whatever their curves say, in a table either."""
    machine = replace(cost_model.load("h200x4"), kernels=(*_curves("hopper ", 500.0), *_curves("wide ", 400.0)))
    assert FACTS.experts * LEAST_ROWS[WIDE] == 8192 * FACTS.choices
    (_, hopper_us, _), _, (_, wide_us, none) = _on(machine, 8192)[1:]
    assert hopper_us is not None and wide_us is not None and wide_us < hopper_us and not none
    assert _on(machine, 8191)[3] == (WIDE, None, ["few_rows"])
    asked = TokenCounts(64, most=16384)
    found = tuple(candidates(FACTS, False, asked, KernelContext(machine), TRITON, usable_only=True))
    assert [(row.variant, row.max_tokens) for row in found[0].table] == [(HOPPER, 8191), (WIDE, 16384)]


def test_what_speaks_against_the_hopper_kernels() -> None:
    """All of it, and nothing of it against Triton's."""
    machine = replace(cost_model.load("h200x4"), kernels=(*_curves("", 900.0), *_curves("hopper ", 500.0)))
    odd = replace(FACTS, hidden=6140)
    found = _on(machine, 8192, odd, host=Host(True, lacks_hopper=True))
    (_, us, none), (_, refused_us, refused), (*_, one_too), (*_, wide_too) = found
    assert us is not None and not none
    assert refused_us is None
    assert refused == one_too == wide_too == ["rows_not_aligned", "hopper_kernels_missing"]
    assert _on(machine, 8192, host=Host(False))[1][2] == ["triton_missing"]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("hopper ", ExpertsKernel.HOPPER), ("one_kernel ", ExpertsKernel.ONE), ("", ExpertsKernel.TRITON)],
)
def test_the_graph_says_which_kernels_were_chosen(
    name: str, kernels: ExpertsKernel, graphs: list[fx.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile decides the kernels; previewed on fake tensors of a machine with GPUs."""
    experts, inputs = experts_of(MIXTRAL, "grouped_mm", BF16), routed(64, 2, BF16, BF16, remote=False)
    machine = replace(cost_model.load("h200x4"), kernels=_curves(name, 0.01))
    monkeypatch.setattr(cost_model, "load", lambda _: machine)
    previewed(experts, tuple(inputs), machine="h200x4", force=(RULE,), static=True)
    (graph,) = graphs
    (call,) = graph.find_nodes(op="call_function", target=torch.ops.weave.moe_experts.default)
    assert decode(str(call.args[-1])).kernels == kernels


def test_only_experts_with_rows_are_read() -> None:
    whole = Mixture(4096, 2.0, 8, 64, 32, True, "bfloat16")
    assert whole.active == 8 and whole.weight_bytes == 8 * 3 * 32 * 64 * 2
    assert replace(whole, tokens=1).active == 2
    assert replace(whole, tokens=0).weight_bytes == 0
    half = replace(FACTS, experts=4, has_remote_experts=True)
    assert half.choices_here == 1.0


def test_a_skew_leaves_fewer_experts_with_rows_and_one_rank_with_more() -> None:
    half = Skew(0.5, 0.125)
    spread = Mixture(64, 2.0, 64, 64, 32, True, "bfloat16")
    skewed = replace(spread, skew=half)
    assert spread.active == 55 and skewed.active == 46
    assert spread.rows_of_expert == (2.0, 2.0) and skewed.rows_of_expert == (2.0, 8.0)
    facts = replace(FACTS, experts=16, experts_in_all=64, choices=8, has_remote_experts=True)
    assert mixture_of(facts, False, 64, UNIFORM).rows == 128
    # 8 of 64 experts lie on the one rank of 16, and of the other half of the rows an even part of 8 in 56.
    assert mixture_of(facts, False, 64, half).rows == round(512 * (0.5 + 0.5 * 8 / 56))
    assert mixture_of(facts, False, 64, Skew(1.0, 0.1)).rows == 512, "no rank has more than all"
