"""Mixtures with `ep_implementation="weave"` under `backend="weave"`: exchanged over shared memory, or left, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import weaveopt
from tests.experts.test_models import FAMILY_OF, ids_of, load, sharded
from tests.models import save
from tests.ranks import run_ranks
from weaveopt.ops.moe_sharded.call import ExpertExchangeCall
from weaveopt.ops.moe_sharded.shm import ShmSite
from weaveopt.records.report import Decision

RULE, KIND = "moe_sharded", "expert_exchange"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    for name in ("mixtral", "gpt_oss"):
        save(FAMILY_OF[name], str(path / name))
    return path


def exchanges(model: object) -> list[Decision]:
    graphs = weaveopt.report(model).graphs
    return [each for graph in graphs for each in graph.decisions if each.site.kind == KIND]


def run_rewritten(rank: int, world: int, folder: Path) -> None:
    """One batch on all ranks. The second and third call have other token counts: one graph more, for any number."""
    bound: list[ShmSite] = []

    def bind(call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> ShmSite:
        bound.append(ShmSite(call, text, op, forget))
        return bound[-1]

    ShmSite.bind = staticmethod(bind)  # type: ignore[method-assign]
    for name in ("mixtral", "gpt_oss"):
        theirs, ours = (load(folder, FAMILY_OF[name], each, world) for each in ("all_to_all", "weave"))
        compiled = torch.compile(ours, backend="weave", fullgraph=True, options={"force": [RULE], "strict": True})
        bound.clear()
        with torch.no_grad():
            for tokens in (7, 12, 20):
                want = theirs(ids_of(3, tokens), use_cache=False).logits
                got = compiled(ids_of(3, tokens), use_cache=False).logits
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        decisions = exchanges(compiled)
        assert decisions and all(each.chosen.choice == RULE for each in decisions), decisions
        assert len(bound) >= 2, f"{name} has two mixtures"
        assert all(sum(site.traffic) > 0 for site in bound), f"{name}: {[site.traffic for site in bound]}"


def test_rewritten(folder: Path) -> None:
    run_ranks(run_rewritten, 2, 2, folder, timeout_s=400)


def run_left(rank: int, world: int, folder: Path) -> None:
    """Every rank has a batch of its own size: nothing is compared, the library exchanges, and the report says why."""
    theirs, ours = (sharded(folder, FAMILY_OF["mixtral"], each, world) for each in ("all_to_all", "weave"))
    compiled = torch.compile(ours, backend="weave", fullgraph=True)
    ids = ids_of(rank, 4 + 5 * rank)
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, want, rtol=1e-4, atol=1e-5)
    decisions = exchanges(compiled)
    assert len(decisions) == 2
    assert [[reason.code for reason in each.site.rejections] for each in decisions] == [["tokens_differ"]] * 2


def test_left(folder: Path) -> None:
    run_ranks(run_left, 2, 2, folder, timeout_s=300)
