"""Reductions that are begun and ended: where both operators stand in the graph, their names, operands and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from tests.graphs import forms
from tests.graphs.nonempty import some
from tests.graphs.preview import FORCED, previewed
from tests.rewrites.test_all_reduce_rms_norm import inputs
from tests.rewrites.test_all_reduce_rms_norm_peer import on_gpus
from weaveopt.graph.pattern import SHAPE_ONLY, is_call
from weaveopt.ops.collective_wait.place import place
from weaveopt.ops.reduction.buffers import communication_channel
from weaveopt.ops.reduction.call import decode
from weaveopt.records.candidate import Fabric
from weaveopt.records.order import Order
from weaveopt.records.site import TokenCounts
from weaveopt.records.task import Stream
from weaveopt.rewrites.all_reduce_rms_norm.rule import AllReduceRMSNorm
from weaveopt.rewrites.reduction import fused
from weaveopt.rule import Context, FoundSite, Proposal

BEGIN = torch.ops.weave.all_reduce_norm_begin.default
END = torch.ops.weave.all_reduce_norm_end.default


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule proposes candidates that are begun."""

    def propose(
        self: AllReduceRMSNorm, found: FoundSite, tokens: TokenCounts, context: Context, usable_only: bool = False
    ) -> Sequence[Proposal]:
        return fused.propose(self.name, found, tokens, context, usable_only, between_hosts=False, begun=True)

    monkeypatch.setattr(AllReduceRMSNorm, "propose", propose)


def readers(value: fx.Node) -> list[fx.Node]:
    found = []
    for user in value.users:
        found += readers(user) if is_call(user, SHAPE_ONLY) else [user]
    return found


@pytest.mark.parametrize("form", forms.FORMS, ids=lambda form: form.__name__)
def test_every_form_begins_at_its_collective_and_ends_before_its_readers(
    form: Callable[..., object], graphs: list[fx.Graph]
) -> None:
    report = on_gpus(form, force=FORCED)
    assert report.fallbacks == () and {d.chosen.fabric for d in report.decisions} == {Fabric.PEER}
    graph = graphs[-1]
    begins, ends = (list(graph.find_nodes(op="call_function", target=target)) for target in (BEGIN, END))
    assert len(begins) == len(ends) == len(report.decisions)
    assert [node.name for node in begins] == [d.site.collectives[0] for d in report.decisions]
    for begin, end in zip(begins, ends, strict=True):
        results, operands, started, text = end.args
        call = decode(text)
        assert begin.args[-1] == text and call.begun and call.channel == communication_channel()
        assert not call.normalized_aliases_arena and started == []
        assert [result.args for result in results] == [(begin, 0), (begin, 1), (begin, 2)]
        assert operands == [argument for argument in begin.args if isinstance(argument, fx.Node)]
        assert end.name.startswith("wait_tensor"), end.name
        seen = [reader for result in results for reader in readers(result) if reader is not end]
        assert all(end < reader for reader in some(seen))
        assert end.next in seen or is_call(end.next, SHAPE_ONLY), "as late as its readers allow"
    (plan,) = report.plans
    assert all(buffer.name.endswith(" in flight") for buffer in some(plan.buffers))


def test_an_order_that_names_collectives_holds_for_what_stands_in_their_place(graphs: list[fx.Graph]) -> None:
    on_gpus(forms.chain, force=FORCED)
    graph = graphs[-1]
    begins, ends = (list(graph.find_nodes(op="call_function", target=target)) for target in (BEGIN, END))
    pairs = ((ends[1].name, begins[0].name), (ends[2].name, begins[1].name))
    assert place(graph, Order(pairs)) == Order(pairs)
    for end, begin in ((ends[1], begins[0]), (ends[2], begins[1])):
        (started,) = end.args[2]
        assert started.args == (begin, 0)
    graph.lint()


def test_an_exchange_is_a_task_from_its_collective_to_its_first_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Proposal] = []
    propose = AllReduceRMSNorm.propose

    def spied(self: AllReduceRMSNorm, found: FoundSite, *rest: object) -> Sequence[Proposal]:
        proposals = propose(self, found, *rest)  # type: ignore[arg-type]
        seen.extend(each for each in proposals if each.candidate.allowed)
        assert not any(each.waits_in_line(found.site) for each in proposals if each.candidate.allowed)
        return proposals

    monkeypatch.setattr(AllReduceRMSNorm, "propose", spied)
    on_gpus(forms.chain, force=FORCED)
    for proposal in some(seen):
        (task,) = proposal.tasks
        estimate = proposal.candidate.estimate
        assert estimate is not None and 0 < task.us <= estimate.us
        assert task.stream is Stream.COMMUNICATION and task.begins_after.startswith("all_reduce")
        assert proposal.is_open and task.ends_before.startswith(("mm", "view", "output")), task


def test_ranks_of_one_host_have_no_cores_to_overlap_on() -> None:
    weights = forms.make_weights(torch.float32)
    report = previewed(lambda x, r: forms.chain(weights, x, r), inputs(torch.float32))
    for decision in some(report.decisions):
        own = [each for each in decision.alternatives if each.choice in FORCED and each.fabric is Fabric.SHM]
        assert decision.chosen.choice not in FORCED
        assert all("same_cores" in {why.code for why in each.rejections} for each in some(own))


def test_a_graph_that_may_be_split_has_no_begun_calls() -> None:
    with inductor_config.patch(custom_should_partition_ops=["aten::mm.default"]):
        report = on_gpus(forms.chain, force=FORCED)
    for decision in some(report.decisions):
        assert not decision.rewritten
        codes = {why.code for each in decision.alternatives for why in each.rejections}
        assert fused.GRAPH_MAY_SPLIT.code in codes, codes
