"""Mixtures under `backend="weave"` whose weights travel: every family against eager, and ranks that are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

import weaveopt
from tests.experts.test_data_parallel import load, whole
from tests.fabrics.test_exported import segment_names
from tests.graphs.executing import executing
from tests.graphs.models import one_layer, save
from tests.graphs.sharded_models import FAMILY_OF, MIXTURES, ids_of
from tests.ranks import collect, run_ranks
from tests.ranks.simulated import TEST_ALL
from weaveopt.config import Config, OptionValue
from weaveopt.fabrics import exported_shm
from weaveopt.records.report import Decision, GraphReport

WHOLE = "mixtral"
"""The family with both of its layers, the second of which is fetched under the first, and with other lengths in its
second call: the others have one mixture, and one graph for both calls."""
OF_WAY = {False: ("mixtral", "qwen3_moe", "deepseek_v3"), True: ("mixtral", "gpt_oss")}
"""Families whose ranks call together, and whose ranks are independent: every family once, and all both ways with
`make test-all`."""
if TEST_ALL:
    OF_WAY = {False: MIXTURES, True: MIXTURES}
RULE, TOKENS, KIND = "expert_prefetch", "moe_sharded", "expert_exchange"
FORCED = Config(force=(RULE,), strict=True, timeout_s=30.0, compile_timeout_s=60.0, max_tokens=256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        family = FAMILY_OF[name]
        save(family if name == WHOLE else one_layer(family), str(path / name))
    return path


@pytest.fixture(scope="module")
def one_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    save(one_layer(FAMILY_OF["mixtral"]), str(path / "mixtral"))
    return path


def exchanges(graphs: Sequence[GraphReport]) -> list[Decision]:
    return [each for graph in graphs for each in graph.decisions if each.site.kind == KIND]


def reasons(decision: Decision, choice: str) -> set[str]:
    return {why.code for each in decision.alternatives if each.choice == choice for why in each.rejections}


def run_families(rank: int, world: int, folder: Path, independent: bool) -> list[str]:
    """Ranks have other batches; independent ones also other numbers of calls."""
    for name in OF_WAY[independent]:
        every, model = whole(folder, name), load(folder, name, world, independent)
        reports: list[GraphReport] = []
        compiled = torch.compile(model, backend=executing(FORCED, reports), fullgraph=True, dynamic=independent)
        with torch.no_grad():
            for step in range(1 + 2 * rank if independent else 2):
                ids = ids_of(10 * rank + step, 3 + 4 * rank + 2 * step * (independent or name == WHOLE))
                got, want = compiled(ids, use_cache=False).logits, every(ids, use_cache=False).logits
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        decisions = exchanges(reports)
        assert decisions and all(each.chosen.choice == RULE for each in decisions), decisions
        assert all(dict(each.chosen.parameters)["form"] == "in_place" for each in decisions)
        waits = {code for each in decisions for code in reasons(each, TOKENS)}
        assert ("ranks_independent" in waits) is independent, waits
    return list(OF_WAY[independent])


@pytest.mark.parametrize("independent", [False, True], ids=["together", "independent"])
def test_every_family(independent: bool, folder: Path) -> None:
    assert run_ranks(run_families, 2, 2, folder, independent, timeout_s=300) == [list(OF_WAY[independent])] * 2


def run_inductor(rank: int, world: int, one_mixture: Path) -> None:
    every, model = whole(one_mixture, "mixtral"), load(one_mixture, "mixtral", world, independent=True)
    compiled = torch.compile(model, backend="weave", fullgraph=True, options={"force": [RULE], "strict": True})
    with torch.no_grad():
        for step in range(1 + rank):
            ids = ids_of(10 * rank + step, 5 + 4 * rank)
            got = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(got, every(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    decisions = exchanges(weaveopt.report(compiled).graphs)
    assert decisions and all(each.chosen.choice == RULE for each in decisions), decisions


def test_through_inductor(one_mixture: Path) -> None:
    run_ranks(run_inductor, 2, 2, one_mixture, timeout_s=300)


def run_without_memory(rank: int, world: int, one_mixture: Path) -> list[str]:
    """Ranks that call together leave it to the library, and say why."""
    every, model = whole(one_mixture, "mixtral"), load(one_mixture, "mixtral", world)
    if rank == 1:

        def failing(*_: object) -> None:
            raise RuntimeError("no room in /dev/shm")

        exported_shm.ShmMemory.move = failing  # type: ignore[method-assign]
    reports: list[GraphReport] = []
    compiled = torch.compile(model, backend=executing(FORCED, reports), fullgraph=True)
    ids = ids_of(rank, 4 + 3 * rank)
    with torch.no_grad():
        got = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(got, every(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    decision = exchanges(reports)[-1]
    assert decision.chosen.choice != RULE and "not_shared" in reasons(decision, RULE)
    return [str(value) for each in decision.alternatives for why in each.rejections for _, value in why.values]


def test_memory_that_cannot_be_shared_leaves_it_with_the_reason(one_mixture: Path) -> None:
    for found in run_ranks(run_without_memory, 2, 2, one_mixture, own=True):
        assert any("rank 1: no room in /dev/shm" in each for each in found), found


def run_training(rank: int, world: int, one_mixture: Path) -> None:
    """A training graph is left: its gradients come through the library."""
    model = load(one_mixture, "mixtral", world).train()
    reports: list[GraphReport] = []
    compiled = torch.compile(model, backend=executing(FORCED, reports), fullgraph=True)
    compiled(ids_of(rank, 5), use_cache=False).logits.square().mean().backward()
    decisions = exchanges(reports)
    assert decisions and all("training" in reasons(each, RULE) for each in decisions), decisions
    assert any(each.grad is not None for name, each in model.named_parameters() if "experts" in name)


def test_training_graphs_are_left(one_mixture: Path) -> None:
    run_ranks(run_training, 2, 2, one_mixture)


def logits_of(model: PreTrainedModel, count: int) -> list[Tensor]:
    with torch.no_grad():
        return [model(ids_of(step, 7), use_cache=False).logits for step in range(count)]


def run_gone(rank: int, folder: Path, how: signal.Signals) -> bool:
    """Rank 1 is stopped, or killed, after weights were shared; rank 0 goes on, with the same bits as before."""
    model = load(folder, "mixtral", 2, independent=True)
    options: dict[str, OptionValue] = {"timeout_s": 5.0, "compile_timeout_s": 60.0}
    compiled = torch.compile(model, backend=executing(Config(**options), []), fullgraph=True)  # type: ignore[arg-type]
    before = logits_of(compiled, 4)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid{rank}", str(os.getpid()))
    peer = int(store.get(f"pid{1 - rank}"))
    dist.barrier()
    if rank == 1:
        time.sleep(60.0)  # until the signal; a stopped rank goes on when rank 0 is done
        return True
    os.kill(peer, how)
    time.sleep(0.5)
    after = logits_of(compiled, 4)
    if how is signal.SIGSTOP:
        os.kill(peer, signal.SIGKILL)
    return all(torch.equal(got, want) for got, want in zip(after, before, strict=True)) and len(after) == 4


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_rank_that_is_gone_is_still_read(how: signal.Signals, folder: Path) -> None:
    before = segment_names()
    first, second = collect(run_gone, 2, folder, how, timeout_s=100)
    assert first.value is True, first.error
    assert second.error, "rank 1 was killed"
    assert not segment_names() - before, "no segment has a name that stays"
