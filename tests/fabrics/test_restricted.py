"""The option `fabrics`: every other fabric is rejected with a reason, and the library never is."""

from __future__ import annotations

import pytest
import torch

from tests.graphs import forms
from tests.graphs.preview import FORCED, fake_group
from tests.rewrites.test_all_reduce_rms_norm import inputs
from weaveopt import cost_model
from weaveopt.config import Config, resolve
from weaveopt.errors import OptionError
from weaveopt.fabrics import topology
from weaveopt.preview import preview
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import GraphReport


def reasons(known: topology.Topology) -> dict[Fabric, str | None]:
    return {fabric: None if against is None else against.code for fabric, against in known.fabrics()}


def test_every_fabric_that_is_not_named_is_rejected() -> None:
    here = topology.fake(2, device="cuda")
    assert reasons(here)[Fabric.PEER] is None
    restricted = reasons(here.restricted(["multimem"]))
    assert restricted[Fabric.PEER] == "fabric_excluded" and restricted[Fabric.MULTIMEM] is None
    assert restricted[Fabric.LIBRARY] is None, "the library is always there"
    assert restricted[Fabric.SHM] == "fabric_needs_cpu", "what the machine lacks comes first"
    assert reasons(here.restricted([])) == reasons(here), "no name: all"


def test_names_come_from_the_option_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEAVE_FABRICS", "peer, library")
    assert resolve().fabrics == ("peer", "library")
    assert resolve({"fabrics": ["shm"]}).fabrics == ("shm",)
    with pytest.raises(OptionError, match="option 'fabrics': unknown fabric 'pear': did you mean 'peer'"):
        resolve({"fabrics": ["pear"]})
    monkeypatch.setenv("WEAVE_FABRICS", "hosts")
    with pytest.raises(OptionError, match="unknown fabric 'hosts'"):
        resolve()


def test_ranks_have_to_agree() -> None:
    assert Config(fabrics=("shm",)).agreed()["fabrics"] != Config().agreed()["fabrics"]


def report_with(fabrics: tuple[str, ...]) -> GraphReport:
    """The report on one site of CPU ranks, with the rule forced."""
    torch._dynamo.reset()
    reports: list[GraphReport] = []
    weights = forms.make_weights(torch.float32)
    with fake_group(2), torch.no_grad():
        config = Config(force=FORCED, fabrics=fabrics)
        seen = preview(config, topology.fake(2), cost_model.load("cpu"), reports.append)
        compiled = torch.compile(lambda x, r: forms.pre_norm(weights, x, r), backend=seen, fullgraph=True)
        compiled(*inputs(torch.float32))
    (report,) = reports
    return report


def test_a_graph_is_decided_without_them() -> None:
    assert [each.chosen.fabric for each in report_with(()).decisions] == [Fabric.SHM]
    (decision,) = report_with(("library",)).decisions
    assert not decision.rewritten
    on_shm = [each for each in decision.alternatives if each.fabric is Fabric.SHM]
    assert on_shm and all("fabric_excluded" in {why.code for why in each.rejections} for each in on_shm)
