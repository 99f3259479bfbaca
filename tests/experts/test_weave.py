"""Mixtures with `ep_implementation="weave"` under `backend="weave"`: exchanged over shared memory, or left, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import weaveopt
from tests.experts.test_models import gradients, load
from tests.graphs.executing import executing
from tests.graphs.models import one_layer, save
from tests.graphs.sharded_models import FAMILY_OF, ids_of, sharded
from tests.ranks import run_ranks
from weaveopt.config import Config, OptionValue
from weaveopt.errors import ArenaError
from weaveopt.fabrics import shm
from weaveopt.ops.experts.exchange.call import ExpertExchangeCall
from weaveopt.ops.experts.sharded import op
from weaveopt.ops.experts.sharded.op import traffic
from weaveopt.ops.experts.sharded.shm import ShmExpertExchange
from weaveopt.records.memory import Buffer
from weaveopt.records.report import Decision, GraphReport

RULE, KIND = "moe_sharded", "expert_exchange"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    save(FAMILY_OF["gpt_oss"], str(path / "gpt_oss"))
    return path


@pytest.fixture(scope="module")
def one_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    save(one_layer(FAMILY_OF["mixtral"]), str(path / "mixtral"))
    return path


def exchanges(graphs: Sequence[GraphReport]) -> list[Decision]:
    return [each for graph in graphs for each in graph.decisions if each.site.kind == KIND]


def run_rewritten(rank: int, world: int, folder: Path) -> None:
    """One batch on all ranks. The second and third call have other token counts: one graph more, for any number.

    Without Inductor, which compiles a mixture in the tests below.
    """
    bound: list[ShmExpertExchange] = []

    def bind(call: ExpertExchangeCall, text: str, op: str, forget: Callable[[], None]) -> ShmExpertExchange:
        bound.append(ShmExpertExchange(call, text, op, forget))
        return bound[-1]

    ShmExpertExchange.bind = staticmethod(bind)  # type: ignore[method-assign]
    theirs, ours = (load(folder, FAMILY_OF["gpt_oss"], each, world) for each in ("all_to_all", "weave"))
    reports: list[GraphReport] = []
    config = Config(force=(RULE,), strict=True, max_tokens=256)
    compiled = torch.compile(ours, backend=executing(config, reports), fullgraph=True)
    with torch.no_grad():
        for tokens in (7, 12, 20):
            want = theirs(ids_of(3, tokens), use_cache=False).logits
            got = compiled(ids_of(3, tokens), use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(reports) == 2
    decisions = exchanges(reports)
    assert decisions and all(each.chosen.choice == RULE for each in decisions), decisions
    assert len(bound) >= 2, "two mixtures"
    assert all(sum(site.traffic) > 0 for site in bound), f"{[site.traffic for site in bound]}"


def test_rewritten(folder: Path) -> None:
    run_ranks(run_rewritten, 2, 2, folder, timeout_s=400)


def run_own_batches(rank: int, world: int, folder: Path) -> None:
    """One mixture, by Inductor. Every rank has a batch of its own size.

    Rank 0 compiles anew in the second call, rank 1 in the fourth, so no rank can time an exchange while it compiles. In
    the last call rank 0 has more tokens than were planned for, so all go through the library.
    """
    theirs, ours = (sharded(folder, FAMILY_OF["mixtral"], each, world) for each in ("all_to_all", "weave"))
    options: dict[str, OptionValue] = {"force": [RULE], "strict": True, "max_tokens": 600, "verify": True}
    options["disable"] = ["causal_attention"]  # that one would be timed
    compiled = torch.compile(ours, backend="weave", fullgraph=True, options=options)
    sizes = [(4, 9), (5, 9), (6, 9), (5, 10), (700, 10)]
    with torch.no_grad():
        for at, tokens in enumerate(sizes):
            ids = ids_of(10 * at + rank, tokens[rank])
            want = theirs(ids, use_cache=False).logits
            got = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m: f"{tokens}: {m}")  # noqa: B023
    decisions = exchanges(weaveopt.report(compiled).graphs)
    assert len(decisions) >= 2 and all(each.chosen.choice == RULE for each in decisions), decisions
    assert {each.site.tokens.hint for each in decisions} == {Config().batch_tokens}
    told = [line for graph in weaveopt.report(compiled).graphs for line in graph.timed]
    assert told == [], "such a site is not even tried by itself"
    [text] = {text for text in CALLS if '"fabric":"shm"' in text}
    sent = traffic(text)
    assert sent is not None and min(sent) > 0


CALLS: list[str] = []
"""Texts of the calls that were bound."""


def run_watched(rank: int, world: int, folder: Path) -> None:
    reserve = op.reserve

    def watched(call: ExpertExchangeCall, text: str, buffers: Sequence[Buffer]) -> bool:
        CALLS.append(text)
        return reserve(call, text, buffers)

    op.reserve = watched
    run_own_batches(rank, world, folder)


def test_own_batches(one_mixture: Path) -> None:
    run_ranks(run_watched, 2, 2, one_mixture, timeout_s=400)


def run_training(rank: int, world: int, folder: Path) -> None:
    """Forward over shared memory, backward through the library."""
    ids = ids_of(rank, 5 + 3 * rank)
    want = gradients(sharded(folder, FAMILY_OF["mixtral"], "all_to_all", world), ids)
    options: dict[str, OptionValue] = {"force": [RULE], "strict": True}
    got = gradients(sharded(folder, FAMILY_OF["mixtral"], "weave", world), ids, "weave", options)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_own_batches_train(one_mixture: Path) -> None:
    run_ranks(run_training, 2, 2, one_mixture, timeout_s=400)


def run_without_arena(rank: int, world: int, folder: Path) -> None:
    """Rank 1 has no memory to share: both go through the library, and warn of the reason."""
    theirs, ours = (sharded(folder, FAMILY_OF["mixtral"], each, world) for each in ("all_to_all", "weave"))
    compiled = torch.compile(ours, backend="weave", fullgraph=True, options={"force": [RULE], "strict": True})
    if rank == 1:

        def failing(*_: object) -> None:
            raise ArenaError("no room in /dev/shm")

        shm._fill = failing
    ids = ids_of(rank, 4 + 5 * rank)
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits
        with pytest.warns(UserWarning, match="exchanged through the library: .*rank 1: no room in /dev/shm"):
            got = compiled(ids, use_cache=False).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_rank_without_memory(one_mixture: Path) -> None:
    run_ranks(run_without_arena, 2, 2, one_mixture, timeout_s=300)
