"""A model that Dynamo breaks: the report counts its graphs, says where and why, and what communicated outside them."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

import weaveopt
from tests.ranks import run_ranks
from weaveopt.records.report import GraphBreak, OutsideCommunication, Report
from weaveopt.reporting.document import to_json
from weaveopt.reporting.document_reader import from_json
from weaveopt.reporting.printed_report import PrintedReport
from weaveopt.reporting.text import text

HOOKS = "Module-level backwards hooks require compiled autograd."


@torch.compiler.disable
def _look(x: Tensor) -> None:
    """Follows another graph break, so no graph ends here."""


@torch.compiler.disable
def _in_eager(x: Tensor) -> None:
    dist.all_reduce(x)
    dist.all_reduce(x)


class Block(nn.Module):
    """Three graphs: one up to `norm`, one up to the communication, and one after it, which has no parameters.

    GEMMs and collectives alone: no kernel of Inductor's own has to be compiled.
    """

    def __init__(self, hooked: bool, in_graph: bool = False, summed: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.in_graph, self.summed = in_graph, summed
        if hooked:
            self.norm.register_full_backward_hook(lambda module, *_: dist.all_reduce(module.weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.in_graph:
            x = collectives.all_reduce(x, "sum", dist.group.WORLD) @ x.T
        x = self.norm(x) @ x.T
        if self.summed:
            _in_eager(x)
            _look(x)
        return x @ x.T


def _report(model: nn.Module, *, train: bool = False) -> Report:
    torch._dynamo.reset()
    model.compile(backend="weave", dynamic=False)
    with torch.set_grad_enabled(train):
        out = model(torch.ones(8, 8))
    if train:
        out.sum().backward()
    dist.barrier()  # between two calls, so it belongs to no model
    return weaveopt.report(model)


def _reports(rank: int) -> tuple[Report, Report, Report, Report]:
    """Reports of models: one broken, one without a break, one whose graphs communicate themselves, one trained."""
    broken, whole = _report(Block(hooked=True)), _report(Block(hooked=False, summed=False))
    assert pickle.loads(pickle.dumps(broken)) == broken == copy.deepcopy(broken)
    trained = _report(Block(hooked=True, summed=False), train=True)
    return broken, whole, _report(Block(hooked=True, in_graph=True)), trained


def test_graphs_breaks_and_outside_communication_are_reported() -> None:
    for broken, whole, communicating, trained in run_ranks(_reports, 2, timeout_s=240):
        assert isinstance(broken, PrintedReport), "it came here from another process, and still prints"
        assert broken.num_graphs == 3, "the last of them has no parameters, and is the model's all the same"
        hooked, disabled, looked = broken.breaks
        here = "test_broken_models.py:"
        assert (hooked.reason, hooked.count) == (HOOKS, 1)
        assert here in hooked.where and hooked.where.endswith(" in forward")
        assert "compiled_autograd = True" in hooked.hint
        assert "_in_eager" in disabled.reason and here in disabled.where
        assert "_look" in looked.reason, "a break with nothing to compile in front of it"
        assert broken.outside == (OutsideCommunication("0", 2, disabled.where),)
        printed = " ".join(str(broken).split())
        assert "3 graphs: Dynamo broke the model" in printed
        assert f"graph break ×1 at {hooked.where}: {HOOKS}" in printed
        assert f"at least 2 collectives of group 0 after the break at {disabled.where}" in printed
        assert (whole.num_graphs, whole.breaks, whole.outside) == (1, (), ())
        assert "graph break" not in str(whole)
        assert (communicating.num_graphs, len(communicating.breaks)) == (3, 3)
        assert communicating.outside == (), "a graph that runs again in the same group would be counted too"

        assert [graph.phase for graph in trained.graphs].count("backward") == 2
        (found,) = trained.breaks
        assert (trained.num_graphs, found.reason) == (2, HOOKS)
        assert trained.outside == (OutsideCommunication("0", 1, found.where),), "what the hook does in the backward"


def test_breaks_and_outside_communication_are_in_the_json() -> None:
    found = GraphBreak("Unsupported call", "model.py:3 in forward", "call another", 2)
    report = Report("m", 2, None, breaks=(found,), outside=(OutsideCommunication("0", 4, found.where),))
    assert from_json(to_json(report)) == report
    assert '"graphs_count": 0' in to_json(report)
    assert "graph break ×2 at model.py:3 in forward: Unsupported call (call another)" in text(report)
