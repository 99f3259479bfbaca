"""Rules of every kind go through the whole pipeline without another file being touched."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.emulation.machines import made_up
from tests.graphs import forms
from tests.graphs.preview import fake_group
from tests.house import overlapping_toys, toys
from tests.ranks import run_ranks
from weaveopt import backend, cost_model
from weaveopt.config import Config
from weaveopt.cost_model import Machine
from weaveopt.cost_model.machine import Contention, ContentionRow, CopyContention
from weaveopt.fabrics import topology
from weaveopt.preview import preview
from weaveopt.records.memory import Lifetime
from weaveopt.records.report import GraphReport
from weaveopt.rewrites import RULES
from weaveopt.rule import RuleSet
from weaveopt.sites.reduction.matcher import ReductionMatcher

ROWS, INNER, HIDDEN = 8, forms.INNER, forms.HIDDEN


def previewed(
    fn: object, inputs: tuple[Tensor, ...], rules: RuleSet, machine: Machine, config: Config | None = None
) -> GraphReport:
    """The report on the only graph of `fn`, its sizes numbers, on two CPU ranks that do not exist."""
    from torch._subclasses import FakeTensorMode

    torch._dynamo.reset()
    reports: list[GraphReport] = []
    with fake_group(2), torch.no_grad():
        seen = preview(config or Config(), topology.fake(2), machine, reports.append, rules)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            compiled = torch.compile(fn, backend=seen, fullgraph=True, dynamic=False)  # type: ignore[call-overload]
            compiled(*(mode.from_tensor(each) for each in inputs))
    (report,) = reports
    assert report.fallbacks == ()
    return report


def scaled(x: Tensor) -> Tensor:
    return torch.tanh(x * 3.0) + 1.0


def chain(x: Tensor, product: Tensor, residual: Tensor, norm: Tensor, after: Tensor) -> Tensor:
    total = residual + forms.all_reduce(x @ product)
    return forms.rms(total, norm) @ after + total @ after


def stacked(x: Tensor, product: Tensor, residual: Tensor, norm: Tensor, after: Tensor) -> Tensor:
    """Two layers of `chain`."""
    total = residual + forms.all_reduce(x @ product)
    total = total + forms.all_reduce((forms.rms(total, norm) @ after) @ product)
    return forms.rms(total, norm) @ after


def relus(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    a = torch.relu(forms.all_reduce(x @ first))
    b = torch.relu(forms.all_reduce(a @ second))
    return a + b


def summed(x: Tensor, product: Tensor) -> Tensor:
    return torch.sigmoid(forms.all_reduce(x @ product))


LOCAL = RuleSet((toys.TanhMatcher(),), (toys.FastTanh(),))
BLOCK = RuleSet((ReductionMatcher(), toys.ReluMatcher()), (toys.KeptRelu(),))
HALVES = RuleSet((ReductionMatcher(),), (), (toys.TwoHalves(),))
ROWS_HALVED = RuleSet((ReductionMatcher(),), (RULES.named("all_reduce_rms_norm"),), (overlapping_toys.RowHalves(),))
OWNS_MEMORY = replace(ROWS_HALVED, graph_rules=(overlapping_toys.JoinedHalves(),))


def ahead(fetch_us: float) -> RuleSet:
    return RuleSet(
        (*BLOCK.matchers, overlapping_toys.ScaleMatcher()),
        (toys.KeptRelu(), overlapping_toys.FetchedAhead(fetch_us)),
    )


def fetched(x: Tensor, first: Tensor, second: Tensor, w: Tensor) -> Tensor:
    a = torch.relu(forms.all_reduce(x @ first))
    return torch.relu(forms.all_reduce(a @ second)) * w


def second_candidate(fixed_us: float) -> RuleSet:
    return replace(RULES, site_rules=(RULES.named("all_reduce_rms_norm"), toys.LibrarySum(fixed_us)))


def chain_inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    weights = forms.make_weights(dtype)
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for size in (INNER, HIDDEN))
    return x, weights.product, residual, weights.norm, weights.after


def test_a_local_rewrite_needs_no_group() -> None:
    report = previewed(scaled, (torch.randn(ROWS, HIDDEN),), LOCAL, cost_model.load("cpu"))
    (decision,) = report.decisions
    assert decision.site.groups == () and decision.chosen.choice == "fast_tanh"
    assert decision.baseline is not None and decision.saving_us > 0
    assert report.plans == ()


def test_a_local_rewrite_that_costs_more_is_left() -> None:
    rules = replace(LOCAL, site_rules=(toys.FastTanh(us=1e6),))
    (decision,) = previewed(scaled, (torch.randn(ROWS, HIDDEN),), rules, cost_model.load("cpu")).decisions
    assert decision.chosen.choice == "leave"
    assert [each.code for each in decision.alternatives[0].rejections] == ["no_saving"]


@pytest.mark.parametrize(("rows", "winner"), [(4, "all_reduce_rms_norm"), (64, "library_sum"), (512, "leave")])
def test_a_second_candidate_wins_at_some_sizes(rows: int, winner: str) -> None:
    """One site, not two: 4 rows are faster fused, 64 by the toy, and 512 by the library."""
    # Times never fall in a profile, so the largest size is a machine of its own.
    if rows == 512:
        machine = made_up({1: 10.0, 512: 10.0}, {1: 700.0, 512: 900.0}, HIDDEN * 4)
    else:
        machine = made_up({4: 900.0, 64: 900.0}, {4: 100.0, 64: 700.0}, HIDDEN * 4)
    report = previewed(chain, chain_inputs(rows), second_candidate(300.0), machine)
    (decision,) = report.decisions
    assert decision.chosen.choice == winner
    every = {each.choice for each in (decision.chosen, *decision.alternatives)}
    assert every == {"leave", "all_reduce_rms_norm", "library_sum"}
    assert report.unfused_us == pytest.approx(decision.baseline.us if decision.baseline else 0.0)


def test_buffers_lie_where_their_lifetimes_allow() -> None:
    weights = torch.randn(HIDDEN, HIDDEN)
    inputs = (torch.randn(ROWS, HIDDEN), weights, weights)
    report = previewed(relus, inputs, BLOCK, cost_model.load("cpu"))
    assert [d.chosen.choice for d in report.decisions if d.site.kind == "summed_relu"] == ["kept_relu"] * 2
    (plan,) = report.plans
    count = [buffer for buffer in plan.buffers if buffer.name == toys.COUNT]
    assert len(count) == 1 and len(count[0].owners) == 2 and count[0].lifetime is Lifetime.ARENA
    first, second = ([b for b in plan.buffers if b.name == toys.RESULT and b.first == at] for at in (0, 1))
    (kept,), (last,) = first, second
    scratch = [buffer for buffer in plan.buffers if buffer.name == toys.SCRATCH]
    # The first result is read behind the second site, so nothing of that one may lie on it; scratch is free at once.
    for other in (last, scratch[1]):
        assert other.offset >= kept.offset + kept.num_bytes or kept.offset >= other.offset + other.num_bytes
    assert scratch[0].offset == scratch[1].offset or scratch[0].offset == last.offset


def overlapping_machine(gemm: float = 1.05, exchange: float = 1.05, fused: float = 1.0) -> Machine:
    """An all-reduce takes as long as the GEMM in front of it, a half takes half, and a fused kernel `fused` times as
    long; contention was measured."""
    points = {2**exponent: float(2**exponent) for exponent in range(14)}
    machine = made_up(points, {tokens: fused * us for tokens, us in points.items()}, HIDDEN * 4)
    gemms = tuple(replace(each, launch_us=0.0, samples=None) for each in machine.gemms)
    rows = (ContentionRow(24, gemm, exchange),)
    contention = Contention(machine.gemms[0].origin, rows, library_ctas=24, copies=CopyContention(1.0, 1.0))
    return replace(machine, gemms=gemms, contention=contention)


def test_a_variant_of_the_graph_is_priced_as_a_schedule() -> None:
    inputs = (torch.randn(1024, INNER), torch.randn(INNER, HIDDEN))
    report = previewed(summed, inputs, HALVES, overlapping_machine())
    captured, halves = report.variants
    assert (captured.name, halves.name) == ("captured", "two_halves")
    assert captured.predicted_us is not None and halves.predicted_us is not None
    assert report.variant == "two_halves", "one half's all-reduce runs under the other half's GEMM"
    assert halves.predicted_us < captured.predicted_us
    assert captured.exposed_us is not None and halves.exposed_us is not None
    assert 0.0 < halves.exposed_us < captured.exposed_us


def test_overlap_that_nobody_measured_saves_nothing() -> None:
    inputs = (torch.randn(1024, INNER), torch.randn(INNER, HIDDEN))
    report = previewed(summed, inputs, HALVES, replace(overlapping_machine(), contention=None))
    assert report.variant == "captured"
    assert [each.code for each in report.variants[1].rejections] == ["not_measured"]


def test_a_variant_that_may_not_be_used_says_why() -> None:
    report = previewed(summed, (torch.randn(7, INNER), torch.randn(INNER, HIDDEN)), HALVES, overlapping_machine())
    assert report.variant == "captured"
    assert "odd_rows" in [each.code for each in report.variants[1].rejections]


def test_a_variant_without_a_saving_is_not_taken() -> None:
    machine = replace(overlapping_machine(), relative_error=1e6)
    report = previewed(summed, (torch.randn(1024, INNER), torch.randn(INNER, HIDDEN)), HALVES, machine)
    assert report.variant == "captured"
    assert [each.code for each in report.variants[1].rejections] == ["no_saving"]


def test_a_graph_rule_that_fails_costs_its_own_variant() -> None:
    rules = replace(ROWS_HALVED, graph_rules=(overlapping_toys.Failing(),))
    report = previewed(chain, chain_inputs(1024), rules, overlapping_machine(fused=0.01))
    assert [each.chosen.choice for each in report.decisions] == ["all_reduce_rms_norm"]
    assert [each.code for each in report.variants[1].rejections] == ["rule_failed"] and report.fallbacks == ()


def test_a_graph_rule_is_shown_what_is_exposed() -> None:
    """On a machine whose exchanges take no time it refuses, and nothing of its variant is priced."""
    nothing = dict.fromkeys((1, 1 << 13), 1e-09)
    report = previewed(chain, chain_inputs(96), ROWS_HALVED, made_up(nothing, nothing, HIDDEN * 4))
    assert report.variant == "captured" and len(report.variants) in (1, 2)
    exposed = previewed(chain, chain_inputs(96), ROWS_HALVED, overlapping_machine())
    assert [each.name for each in exposed.variants] == ["captured", "row_halves"]
    assert exposed.variants[1].parameters == (("cut", "96 in two"),)


@pytest.mark.parametrize(("fused", "choices"), [(0.01, ["all_reduce_rms_norm"] * 2), (0.95, ["leave"] * 2)])
def test_the_sites_of_a_variant_are_decided_by_its_timeline(fused: float, choices: list[str]) -> None:
    """A fused kernel that is a little faster than the library's all-reduce would win at either site by itself. But the
    library's is hidden under the other half's work, and so the halves are left to it; a much faster one wins still."""
    machine = overlapping_machine(fused=fused)
    config = Config(force=("row_halves",))
    report = previewed(chain, chain_inputs(1024), ROWS_HALVED, machine, config)
    assert report.variant == "row_halves"
    assert [each.chosen.choice for each in report.decisions] == choices
    by_itself = previewed(chain, chain_inputs(1024), ROWS_HALVED, machine, Config(disable=("row_halves",)))
    assert [each.chosen.choice for each in by_itself.decisions] == ["all_reduce_rms_norm"]
    assert [each.code for each in by_itself.variants[1].rejections] == ["disabled"]


def test_nothing_waits_in_line_while_an_exchange_is_in_flight() -> None:
    """Two halves are both fused, or both left: one in line under the other's exchange could block the ranks."""
    config = Config(force=("row_halves",))
    report = previewed(chain, chain_inputs(1024), ROWS_HALVED, overlapping_machine(fused=0.95), config)
    codes = {why.code for each in report.decisions for other in each.alternatives for why in other.rejections}
    assert "waits_beside_exchange" in codes


@pytest.mark.parametrize(("copies", "choice"), [(CopyContention(1.0, 1.0), "fetched_ahead"), (None, "leave")])
def test_work_begun_a_layer_ahead_is_hidden(copies: CopyContention | None, choice: str) -> None:
    """The copy takes longer than the site as it is, and nothing where the layer between hides it."""
    machine = overlapping_machine()
    assert machine.contention is not None
    memory = cost_model.load("cpu").memory
    machine = replace(machine, memory=memory, contention=replace(machine.contention, copies=copies))
    inputs = (*(torch.randn(ROWS * 64, HIDDEN), *[torch.randn(HIDDEN, HIDDEN)] * 2), torch.randn(HIDDEN))
    report = previewed(fetched, inputs, ahead(fetch_us=30.0), machine)
    (decision,) = [each for each in report.decisions if each.site.kind == "scaled_rows"]
    assert decision.chosen.choice == choice
    if choice == "leave":
        return
    # From the first GEMM on peers may write into it, so no buffer of the layer between has its bytes.
    (plan,) = report.plans
    (copied,) = [each for each in plan.buffers if each.name == overlapping_toys.FETCHED]
    others = [each for each in plan.buffers if each.name in (toys.SCRATCH, toys.RESULT)]
    assert len(others) == 4 and copied.first == 0
    for each in others:
        assert each.offset >= copied.offset + copied.num_bytes or copied.offset >= each.offset + each.num_bytes
    assert [channel.name for channel in plan.channels] == ["main", overlapping_toys.CHANNEL]


def _halves_on_ranks(
    rank: int, row_counts: tuple[int, ...]
) -> tuple[list[tuple[str, ...]], list[str], list[tuple[tuple[int, int], ...]]]:
    """`chain` in two halves of a symbolic number of rows, both fused, against eager."""
    from weaveopt.reporting import registry

    weave = functools.partial(backend.weave, rules=ROWS_HALVED)
    options = {"strict": True, "force": ["row_halves", "all_reduce_rms_norm"]}
    with torch.no_grad():
        compiled = torch.compile(chain, backend=weave, options=options)
        for rows in row_counts:
            x, product, residual, norm, after = chain_inputs(rows)
            x = x * (rank + 1)
            for each in (x, residual):
                torch._dynamo.mark_dynamic(each, 0)
            inputs = (x, product, residual, norm, after)
            torch.testing.assert_close(compiled(*inputs), chain(*inputs), rtol=1e-4, atol=1e-4)
    graphs = registry.report(None).graphs
    choices = [tuple(each.chosen.choice for each in graph.decisions) for graph in graphs]
    counts = [tuple((each.site.tokens.least, each.site.tokens.most) for each in graph.decisions) for graph in graphs]
    return choices, [graph.variant for graph in graphs], counts


def test_a_variant_of_symbolic_size_with_fused_sites_on_ranks() -> None:
    for choices, variants, counts in run_ranks(_halves_on_ranks, 2, (6, 7, 2, 3, 33, 256, 511), timeout_s=300):
        assert set(variants) == {"row_halves"}
        assert set(choices) == {("all_reduce_rms_norm",) * 2}
        # The halves of three rows are one and two: equal in the call of two rows that was compiled for, not in others.
        assert ((1, 1), (1, 2)) in counts


def _joined_on_ranks(rank: int) -> tuple[str, list[str], list[tuple[str, int]]]:
    """`stacked` in two halves that an operator of the rule joins in the arena, against eager."""
    from weaveopt.reporting import registry

    options = {"strict": True, "force": ["joined_halves"]}
    weave = functools.partial(backend.weave, rules=OWNS_MEMORY)
    with torch.no_grad():
        compiled = torch.compile(stacked, backend=weave, options=options, dynamic=False)
        x, *rest = chain_inputs(96)
        for _ in range(3):
            torch.testing.assert_close(
                compiled(x * (rank + 1), *rest), stacked(x * (rank + 1), *rest), rtol=1e-4, atol=1e-4
            )
    (report,) = registry.report(None).graphs
    buffers = [(each.name, each.num_bytes) for plan in report.plans for each in plan.buffers]
    return report.variant, [each.step for each in report.fallbacks], buffers


def test_operators_of_a_variant_have_memory_of_their_own() -> None:
    for variant, fallbacks, buffers in run_ranks(_joined_on_ranks, 2, timeout_s=300):
        assert (variant, fallbacks) == ("joined_halves", [])
        assert (overlapping_toys.JOINED, 96 * INNER * 4) in buffers


def _ordered_on_ranks(
    rank: int, defeated: tuple[int, ...], refusing: tuple[int, ...], failing: tuple[int, ...] = ()
) -> tuple[str, list[str]]:
    """`stacked` in two halves whose all-reduces are the library's, against eager; the variant, and every reason.

    On `defeated` ranks nothing states the order that is asked of Inductor; `refusing` ranks make no variant, nor do
    `failing` ones, whose rule raises.
    """
    from weaveopt.pipeline import rewrite
    from weaveopt.reporting import registry

    if rank in defeated:
        rewrite.place = lambda graph, order: order
    refuses = rank in refusing
    rule = overlapping_toys.Failing() if rank in failing else overlapping_toys.RowHalves(refuses=refuses)
    rules = replace(ROWS_HALVED, graph_rules=(rule,))
    options = {"force": ["row_halves"], "disable": ["all_reduce_rms_norm"]}
    with torch.no_grad():
        compiled = torch.compile(stacked, backend=functools.partial(backend.weave, rules=rules), options=options)
        x, *rest = chain_inputs(96)
        for _ in range(3):
            torch.testing.assert_close(
                compiled(x * (rank + 1), *rest), stacked(x * (rank + 1), *rest), rtol=1e-4, atol=1e-4
            )
    (report,) = registry.report(None).graphs
    codes = [why.code for each in report.variants for why in each.rejections]
    return report.variant, [*codes, *(each.step for each in report.fallbacks)]


@pytest.mark.parametrize(
    ("defeated", "refusing", "failing", "variant", "reasons"),
    [
        ((), (), (), "row_halves", [set()] * 2),
        # Equal halves: Inductor makes one kernel of both norms, which waits for both sums.
        ((1,), (), (), "captured", [{"order_not_kept", "order"}] * 2),
        ((), (1,), (), "captured", [set(), {"nothing_exposed"}]),
        ((), (), (1,), "captured", [set(), {"rule_failed"}]),
    ],
)
def test_ranks_keep_the_order_of_a_variant_or_run_the_captured_graph(
    defeated: tuple[int, ...], refusing: tuple[int, ...], failing: tuple[int, ...], variant: str,
    reasons: list[set[str]],
) -> None:  # fmt: skip
    found = run_ranks(_ordered_on_ranks, 2, defeated, refusing, failing, timeout_s=300)
    assert [each for each, _ in found] == [variant] * 2
    assert [set(codes) for _, codes in found] == reasons


def _on_ranks(rank: int, name: str, forced: str, sizes: tuple[tuple[int, ...], ...]) -> tuple[list[str], str]:
    """The function of that name by the toys' rules, against eager; every choice, and the variant that ran."""
    rules = {
        "scaled": LOCAL, "chain": second_candidate(1.0), "relus": BLOCK, "summed": HALVES, "fetched": ahead(1.0)
    }[name]  # fmt: skip
    fn = {"scaled": scaled, "chain": chain, "relus": relus, "summed": summed, "fetched": fetched}[name]
    generator = torch.Generator().manual_seed(0)
    shared = [torch.randn(*size, generator=generator) * 0.3 for size in sizes]
    inputs = (shared[0] * (rank + 1), *shared[1:])  # what is summed differs by rank
    from weaveopt.reporting import registry

    weave = functools.partial(backend.weave, rules=rules)
    with torch.no_grad():
        want = fn(*inputs)
        compiled = torch.compile(fn, backend=weave, options={"strict": True, "force": [forced]}, dynamic=False)
        for _ in range(3):
            torch.testing.assert_close(compiled(*inputs), want, rtol=1e-4, atol=1e-4)
    (report,) = registry.report(None).graphs
    return [decision.chosen.choice for decision in report.decisions], report.variant


@pytest.mark.parametrize(
    ("name", "forced", "sizes", "choices", "variant"),
    [
        ("scaled", "fast_tanh", ((6, 64),), ["fast_tanh"], "captured"),
        ("chain", "library_sum", ((6, 48), (48, 64), (6, 64), (64,), (64, 48)), ["library_sum"], "captured"),
        ("relus", "kept_relu", ((6, 64), (64, 64), (64, 64)), ["leave", "kept_relu"] * 2, "captured"),
        ("summed", "two_halves", ((6, 48), (48, 64)), ["leave"] * 2, "two_halves"),
        ("fetched", "fetched_ahead", ((6, 64), (64, 64), (64, 64), (64,)),
         ["leave", "kept_relu"] * 2 + ["fetched_ahead"], "captured"),
    ],
)  # fmt: skip
def test_on_ranks(name: str, forced: str, sizes: tuple[tuple[int, ...], ...], choices: list[str], variant: str) -> None:
    for found in run_ranks(_on_ranks, 2, name, forced, sizes, timeout_s=300):
        assert (sorted(found[0]), found[1]) == (sorted(choices), variant)
