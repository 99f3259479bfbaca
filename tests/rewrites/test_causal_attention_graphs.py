"""The rule `causal_attention` in whole graphs: masks that layers share, refusals, training, prices, other rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graphs import forms
from tests.graphs.attention_graphs import (
    As,
    Compute,
    Ran,
    Sizes,
    attend,
    attend_written,
    bias,
    ran,
    ran_each,
    repeat,
    rows,
    rules_of,
    seen,
)
from tests.graphs.executing import FORCED, executing
from tests.graphs.nonempty import some
from tests.graphs.preview import previewed
from tests.graphs.tolerances import KERNEL, LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt.config import Config
from weaveopt.records.candidate import LEAVE
from weaveopt.records.report import GraphReport
from weaveopt.rewrites import RULES
from weaveopt.rewrites.causal_attention.candidates import RULE

aten, prims, weave = torch.ops.aten, torch.ops.prims, torch.ops.weave
SIZES = Sizes()
WEIGHTS = forms.make_weights(torch.float32)
PRODUCT = torch.cat([WEIGHTS.product, WEIGHTS.product[:16]])
NUM_LAYERS = 3
MAKES_MASKS = {aten.where.self, aten.le.Tensor, aten.bitwise_and.Tensor, prims.iota.default, aten.full.default}


def _layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention three times: what one makes are the next one's queries."""
    for _ in range(NUM_LAYERS):
        q = attend(q, k, v, mask).view(2, 24, 4, 16).transpose(1, 2)
    return rows(q)


def _left_padded() -> Tensor:
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = False
    return mask


def _targets(found: Ran) -> Counter[object]:
    return Counter(node.target for node in found.graph.nodes if node.op == "call_function")


def test_layers_share_the_ranges_of_their_mask() -> None:
    """One mask of three layers is read once for what it admits, and the bias that was made of it is gone."""

    def compute(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return _layers(q, k, v, seen(24, 24) & padding[:, None, None])

    operands = (*SIZES.operands(torch.bfloat16), _left_padded())
    found = ran(compute, operands, As("h200x4", rules_of("masked")))
    counts = _targets(found)
    assert (counts[weave.masked_attention.default], counts[weave.key_ranges.default]) == (NUM_LAYERS, 1)
    assert not counts[aten.where.self] and not counts[aten.expand.default], "neither a bias nor repeated keys are made"
    assert counts[aten.bitwise_and.Tensor] == 1
    calls = [node for node in found.graph.nodes if node.target is weave.masked_attention.default]
    assert len({(call.args[3], call.args[4]) for call in calls}) == 1
    assert_close(found.result, compute(*operands), KERNEL)


def test_two_masks_have_ranges_of_their_own() -> None:
    """Sliding and full layers mixed."""

    def compute(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        sliding, full = (seen(24, 24, window=window) & padding[:, None, None] for window in (4, 0))
        for mask in (sliding, full, sliding, full):
            q = attend(q, k, v, mask).view(2, 24, 4, 16).transpose(1, 2)
        return rows(q)

    operands = (*SIZES.operands(torch.bfloat16), _left_padded())
    found = ran(compute, operands, As("h200x4", rules_of("masked")))
    counts = _targets(found)
    assert (counts[weave.masked_attention.default], counts[weave.key_ranges.default]) == (4, 2)
    assert [dict(d.site.facts)["reads_of_mask"] for d in found.decisions] == [2] * 4
    assert_close(found.result, compute(*operands), KERNEL)


def test_what_is_hidden_is_negated_once() -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        added = torch.zeros(2, 1, 24, 24, dtype=q.dtype).masked_fill(hidden[:, None, None], -torch.inf)
        return _layers(q, k, v, added)

    operands = (*SIZES.operands(torch.bfloat16), torch.arange(24).expand(2, 24) % 5 == 1)
    found = ran(compute, operands, As("h200x4", rules_of("masked")))
    counts = _targets(found)
    assert counts[aten.bitwise_not.default] == counts[weave.key_ranges.default] == 1
    assert_close(found.result, compute(*operands), KERNEL)


@pytest.mark.parametrize("form", ["flash", "cudnn", "masked"])
def test_a_proven_mask_leaves_the_graph(form: str) -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _layers(q, k, v, bias(seen(24, 24), q.dtype, -torch.inf))

    operands = SIZES.operands(torch.bfloat16)
    found, left = ran_each(compute, operands, [As("h200x4", rules_of(form)), As("h200x4", rules_of("none"))])
    assert MAKES_MASKS & set(_targets(left)), "or this test would see nothing"
    assert not MAKES_MASKS & set(_targets(found)) and not found.count(weave.key_ranges.default)
    assert_close(found.result, compute(*operands), KERNEL)


def test_a_mask_that_others_read_stays() -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = bias(seen(24, 24), q.dtype, -1e30)
        return attend(q, k, v, mask) + mask.sum()

    operands = SIZES.operands(torch.bfloat16)
    found = ran(compute, operands, As("h200x4", rules_of("flash")))
    assert found.chosen.choice == RULE and found.count(aten.where.self) == 1
    assert_close(found.result, compute(*operands), KERNEL)


def test_keys_and_values_that_others_read_stay_repeated() -> None:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = repeat(k, 2)
        return rows(F.scaled_dot_product_attention(q, key, repeat(v, 2), is_causal=True)) + key.sum()

    operands = SIZES.operands(torch.bfloat16)
    ways = [As("h200x4", rules_of(form)) for form in ("flash", "grouped")]
    for found in some(ran_each(compute, operands, ways)):
        assert found.chosen.choice == RULE and found.count(aten.expand.default) == 1, "that of the keys"
        assert_close(found.result, compute(*operands), KERNEL)


def _per_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi: a bias that grows with the distance, by head."""
    distance = torch.arange(24)[:, None] - torch.arange(24)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    added = (-distance * slopes).to(q.dtype).masked_fill(distance < 0, -torch.inf)
    return attend(q, k, v, added[None].expand(2, 4, 24, 24))


def _weights_are_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat(k, 2).transpose(2, 3)) * 0.25
    weights = torch.softmax(scores + bias(seen(24, 24), q.dtype, -torch.inf), -1)
    return rows(torch.matmul(weights, repeat(v, 2))) + weights.sum()


def _bias_comes_in(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return attend(q, k, v, added)


@pytest.mark.parametrize(
    ("compute", "more", "code"),
    [
        (_per_head, (), "bias_not_boolean"),
        (_bias_comes_in, (torch.zeros(2, 1, 24, 24, dtype=torch.bfloat16),), "bias_not_boolean"),
        (_weights_are_read, (), "weights_are_read"),
    ],
    ids=["per_head", "bias_comes_in", "weights_are_read"],
)
@pytest.mark.parametrize("machine", ["cpu", "h200x4"])
def test_what_no_kernel_may_do_is_refused(compute: Compute, more: tuple[Tensor, ...], code: str, machine: str) -> None:
    operands = (*SIZES.operands(torch.bfloat16), *more)
    found = ran(compute, operands, As(machine))
    assert [r.code for r in found.decision.site.rejections] == [code] and found.chosen.choice == LEAVE
    assert all(rejection.message for rejection in found.decision.site.rejections)
    assert_close(found.result, compute(*operands), KERNEL)


def test_a_mask_of_floats_that_comes_in_is_refused_for_what_it_may_hold() -> None:
    """0 and the dtype's minimum could be read as booleans; what else a caller adds could not, and counts."""
    added = torch.where(seen(24, 24), 0.0, torch.finfo(torch.bfloat16).min).to(torch.bfloat16).expand(2, 1, 24, 24)
    operands = SIZES.operands(torch.bfloat16)
    for mask in (added.contiguous(), (added + torch.arange(24).to(torch.bfloat16) / 16).contiguous()):
        found = ran(_bias_comes_in, (*operands, mask), As("cpu"))
        (refused,) = found.decision.site.rejections
        assert "only at run time is it known" in refused.message
        assert_close(found.result, attend(*operands, mask), KERNEL)


def test_dropout_is_refused() -> None:
    """Only GPUs have an operator with dropout, so the graph is made and not run."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return aten._scaled_dot_product_flash_attention(q, repeat(k, 2), repeat(v, 2), 0.1, True)[0]  # type: ignore[no-any-return]

    report = previewed(compute, SIZES.operands(torch.bfloat16), machine="h200x4", force=(RULE,), static=True)
    (decision,) = report.decisions
    assert [r.code for r in decision.site.rejections] == ["dropout"] and not decision.rewritten


@pytest.mark.parametrize("machine", ["cpu", "h200x4"])
def test_training_graphs_are_left(machine: str) -> None:
    """Their backward pass reads what the forward's operator saved: results and gradients are eager's."""
    operands = [each.requires_grad_() for each in SIZES.operands(torch.float32)]
    reports: list[GraphReport] = []

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _layers(q, k, v, bias(seen(24, 24), q.dtype, -torch.inf))

    compute(*operands).square().sum().backward()
    want = [each.grad for each in operands]
    for each in operands:
        each.grad = None
    torch._dynamo.reset()
    config = _config(machine)
    torch.compile(compute, backend=executing(config, reports), fullgraph=True)(*operands).square().sum().backward()
    forward, backward = reports
    assert (forward.phase, backward.phase) == ("forward", "backward")
    codes = [[r.code for r in decision.site.rejections] for decision in forward.decisions]
    assert codes == [["saved_for_backward"]] * NUM_LAYERS and forward.num_rewritten == backward.num_rewritten == 0
    for each, grad in zip(operands, want, strict=True):
        assert grad is not None and each.grad is not None
        assert torch.equal(each.grad, grad)


def _config(machine: str) -> Config:
    return replace(FORCED, machine=machine)


# --- symbolic sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "machine"), [("flash", "h200x4"), ("cudnn", "h200x4"), ("cpu", "cpu")])
def test_symbolic_lengths(form: str, machine: str) -> None:
    """One graph for all prompts: as many queries as keys, proven causal for every length."""
    reports: list[GraphReport] = []

    def compute(x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (each.view(2, length, -1, 16).transpose(1, 2) for each in x.split((64, 32, 32), 2))
        return attend(q, k, v, seen(length, length))

    torch._dynamo.reset()
    compiled = torch.compile(compute, backend=executing(_config(machine), reports, rules_of(form)), fullgraph=True)
    with torch.no_grad():
        for length in (24, 31, 9):
            x = torch.randn(2, length, 128, generator=torch.Generator().manual_seed(length)).bfloat16()
            torch._dynamo.mark_dynamic(x, 1)
            assert_close(compiled(x), compute(x), KERNEL, f"{length} positions")
    (report,) = reports
    (decision,) = report.decisions
    assert decision.chosen.variant == form and dict(decision.site.facts)["has_symbols"]


def test_symbolic_keys_behind_a_known_query_are_refused_or_read() -> None:
    """A cache that grows: where the query stands differs from call to call, so no kernel of the library gets it."""
    reports: list[GraphReport] = []

    def compute(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        return attend(q, k, v, torch.arange(k.shape[2])[None, None, None] <= last)

    torch._dynamo.reset()
    compiled = torch.compile(compute, backend=executing(_config("h200x4"), reports, rules_of("masked")), fullgraph=True)
    with torch.no_grad():
        for keys, last in ((24, 20), (33, 7)):
            operands = Sizes(queries=1, keys=keys).operands(torch.bfloat16)
            for each in operands[1:]:
                torch._dynamo.mark_dynamic(each, 2)
            got, want = (fn(*operands, torch.tensor(last)) for fn in (compiled, compute))
            assert_close(got, want, KERNEL, f"{keys} keys")
    (report,) = reports
    assert [dict(d.chosen.parameters) for d in report.decisions] == [{"reads_mask": True}]


# --- with other rules, and on several ranks ---------------------------------------------------------------------------


def _layer(
    q: Tensor, k: Tensor, v: Tensor, residual: Tensor, norm: Tensor = WEIGHTS.norm, product: Tensor = PRODUCT
) -> tuple[Tensor, ...]:
    """Attention, the output's projection, its all-reduce, the residual and the norm, twice."""
    for _ in range(2):
        attended = attend(q, k, v, seen(24, 24))
        residual = residual + forms.all_reduce(attended @ product)
        q = forms.rms(residual, norm).view(2, 24, 4, 16).transpose(1, 2)
    return rows(q), residual


def _rank(rank: int) -> list[list[tuple[str, str, bool]]]:
    """The layer with both rules, and then with a rank whose attention has another form."""
    _, k, v = SIZES.operands(torch.float32, seed=rank)
    residual = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(9))
    q, _, _ = SIZES.operands(torch.float32, seed=7)
    found = []
    for rules in (RULES, rules_of("cpu" if rank == 0 else "grouped")):
        reports: list[GraphReport] = []
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(_layer, backend=executing(FORCED, reports, rules), fullgraph=True, dynamic=False)
            for got, want in zip(compiled(q, k, v, residual), _layer(q, k, v, residual), strict=True):
                assert_close(got, want, LIBRARY, f"rank {rank}")
        found.append([(d.site.kind, str(d.chosen.parameters), d.rewritten) for d in reports[0].decisions])
    return found


def test_both_rules_in_one_graph_and_a_local_rewrite_is_each_ranks_own() -> None:
    (same, first), (too, second) = run_ranks(_rank, 2, timeout_s=200)
    assert same == too and [(kind, rewritten) for kind, _, rewritten in same] == [
        ("attention", True), ("reduction", True)
    ] * 2  # fmt: skip
    assert {rewritten for kind, _, rewritten in (*first, *second) if kind == "attention"} == {True}
    assert first != second, "another attention on each rank"


def test_sites_of_both_kinds_share_no_node() -> None:
    """Previewed for GPUs too, where other kernels serve."""
    expected = {"all_reduce_rms_norm": 2, "causal_attention": 2}
    for machine, device, dtype in (("cpu", "cpu", torch.float32), ("h200x4", "cuda", torch.bfloat16)):
        layer = partial(_layer, norm=WEIGHTS.norm.to(dtype), product=PRODUCT.to(dtype))
        operands = (*SIZES.operands(dtype), torch.randn(2, 24, 64).to(dtype))
        report = previewed(layer, operands, machine=machine, device=device, force=tuple(expected), static=True)
        assert report.fallbacks == () and [d.rewritten for d in report.decisions] == [True] * 4
        assert Counter(d.chosen.choice for d in report.decisions) == expected


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(4, 1, 2), (4, 1, 1), (4, 4, 2), (1, 1, 1), (8, 2, 3)])
def test_written_attention_of_any_number_of_heads(heads: int, kv_heads: int, batch: int) -> None:
    """`matmul` folds, views or copies its operands by their strides."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_written(q, k, v, bias(seen(24, 24), q.dtype, -torch.inf), softcap=5.0)

    operands = Sizes(batch, heads, kv_heads).operands(torch.bfloat16)
    found = ran(compute, operands, As("h200x4"))
    facts = dict(found.decision.site.facts)
    assert (facts["heads"], facts["kv_heads"], facts["is_repeated"]) == (heads, kv_heads, heads != kv_heads)
    assert found.chosen.variant == "masked" and not found.count(aten.bmm.default)
    assert_close(found.result, compute(*operands), KERNEL)


def test_sinks_and_soft_caps_together_with_a_read_mask() -> None:
    """As gpt-oss with padding: what the library cannot do at all is what weave's kernel is for."""

    def compute(q: Tensor, k: Tensor, v: Tensor, padding: Tensor, sinks: Tensor) -> Tensor:
        mask = bias(seen(24, 24, window=6) & padding[:, None, None], q.dtype, torch.finfo(q.dtype).min)
        return attend_written(q, k, v, mask, sinks, softcap=4.0)

    operands = (*SIZES.operands(torch.bfloat16), _left_padded(), torch.linspace(-1.0, 2.0, 4).bfloat16())
    found = ran(compute, operands, As("h200x4"))
    assert found.chosen.variant == "masked" and found.count(weave.key_ranges.default) == 1
    facts = dict(found.decision.site.facts)
    assert facts["has_sinks"] and facts["softcap"] == 4.0 and facts["is_written_out"]
    got, want = found.result, compute(*operands)
    # The first rows of a padded sequence see no key: eager spreads their weights over all of them.
    assert_close(got[0, 5:], want[0, 5:], KERNEL)
    assert_close(got[1], want[1], KERNEL)
    assert torch.count_nonzero(got[0, :5]) == 0


def test_attention_of_another_layout_that_leaves_the_graph() -> None:
    """Written out it is contiguous, while the kernel's result goes by the layout of the queries."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=places[:, None] >= places)

    operands = [torch.randn(1, 16, 2, 9).permute(0, 2, 3, 1) for _ in range(3)]
    reports: list[GraphReport] = []
    with torch.no_grad():
        found = torch.compile(compute, backend=executing(FORCED, reports), fullgraph=True)(*operands)
        wanted = compute(*operands)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()
    assert [decision.rewritten for report in reports for decision in report.decisions] == [True]
