"""Ranks that differ converge: what differs is left by all of them, and nothing that runs under Inductor is stopped."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt import cost_model
from weaveopt.config import Config
from weaveopt.errors import WeaveError
from weaveopt.fabrics import rounds
from weaveopt.inductor.dynamo import current_compile
from weaveopt.pipeline import agree, shared_facts
from weaveopt.pipeline import plan as planning
from weaveopt.records.candidate import Rejection
from weaveopt.records.report import GraphReport
from weaveopt.rewrites import RULES
from weaveopt.rule import Context

RULE = "all_reduce_rms_norm"
TOKENS = 6
Block = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def config(force: tuple[str, ...] = (RULE,), disable: tuple[str, ...] = ()) -> Config:
    return Config(force=force, disable=disable, timeout_s=20.0, compile_timeout_s=60.0)


def inputs(rank: int, width: int = forms.INNER, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(5 + rank))
    return x, torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(3))


def two_layers(
    rank: int, bias: bool = False, residual: bool = True, more: bool = False, plus_one: bool = False
) -> Block:
    """Row-parallel layers, of which the first differs as it is asked to."""
    w = forms.make_weights(torch.float32)
    norm = forms.rms_plus_one if plus_one else forms.rms

    def block(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        first = forms.all_reduce(F.linear(x, w.product[: x.shape[-1]].t(), w.bias if bias else None))
        total = total + first if residual else first
        x = norm(total, w.norm) @ w.after
        second = total + forms.all_reduce(x @ w.product)
        normalized = forms.rms(second, w.norm)
        return (normalized, second, total) if more else (normalized,)

    return block


@dataclass(frozen=True)
class Found:
    """Outcome of a graph on one rank."""

    rewritten: tuple[bool, ...]
    reasons: tuple[str, ...]
    """Messages of the rejections `ranks_differ`, sorted."""
    fallbacks: tuple[str, ...] = ()


def said(error: Exception) -> str:
    """An error of weaveopt's, out of what Dynamo puts around a backend's."""
    inner = getattr(error, "inner_exception", error)
    assert isinstance(inner, WeaveError), repr(error)
    return f"{type(inner).__name__}: {inner}"


def found(graph: GraphReport) -> Found:
    decisions = [each for each in graph.decisions if each.site.groups]
    messages = {
        why.message
        for decision in decisions
        for candidate in decision.alternatives
        for why in candidate.rejections
        if why.code == "ranks_differ"
    }
    return Found(
        tuple(each.rewritten for each in decisions),
        tuple(sorted(messages)),
        tuple(f"{each.step}: {each.error}" for each in graph.fallbacks),
    )


def run(block: Block, own: Config, *arguments: Tensor) -> list[Found]:
    reports: list[GraphReport] = []
    compiled = torch.compile(block, backend=executing(own, reports), dynamic=False)
    with torch.no_grad():
        for got, want in zip(compiled(*arguments), block(*arguments), strict=True):
            assert_close(got, want, LIBRARY)
    return [found(graph) for graph in reports]


CASES: dict[str, Callable[[int], Block]] = {
    "bias": lambda rank: two_layers(rank, bias=rank == 0),
    "residual": lambda rank: two_layers(rank, residual=rank != 0),
    "outputs": lambda rank: two_layers(rank, more=rank == 0),
    "norm": lambda rank: two_layers(rank, plus_one=rank == 1),
    "shard": two_layers,
}


def run_case(rank: int, case: str, rules: bool) -> list[Found]:
    width = (7 if rank == 0 else 6) if case == "shard" else forms.INNER
    own = config() if rules else config(force=(), disable=RULES.names)
    if not rules:

        def collect(*arguments: object) -> object:
            raise AssertionError("nothing is rewritten, so nothing is compared")

        module: object = rounds.Rounds
        setattr(module, "collect", collect)  # noqa: B010
    return run(CASES[case](rank), own, *inputs(rank, width))


@pytest.mark.parametrize(
    ("case", "rewritten"),
    [("bias", (True, True)), ("shard", (True, True)), ("residual", (False, True)), ("norm", (False, True)),
     ("outputs", (False, False))],
)  # fmt: skip
def test_what_differs_is_left_by_all_ranks(case: str, rewritten: tuple[bool, ...]) -> None:
    (first,), (second,) = run_ranks(run_case, 2, case, True)
    assert first.rewritten == second.rewritten == rewritten
    assert first.reasons == second.reasons and not first.fallbacks
    assert all("differ in" in reason for reason in first.reasons)
    assert bool(first.reasons) == (False in rewritten)


def parallel_branches(rank: int, rows: int = 8) -> Block:
    """Rows of a sharded vocabulary, and two branches whose sums nothing orders (GPT-NeoX, Phi)."""
    w, first = forms.make_weights(torch.float32), rank * rows
    table = torch.randn(rows, forms.HIDDEN, generator=torch.Generator().manual_seed(rank))

    def block(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        outside = (ids < first) | (ids >= first + rows)
        found = F.embedding((ids - first).masked_fill(outside, 0), table).masked_fill(outside[..., None], 0.0)
        total = forms.all_reduce(found)
        inner = forms.rms(total, w.norm) @ w.after
        total = total + forms.all_reduce((inner + x) @ w.product) + forms.all_reduce(inner.relu() @ w.product)
        return (forms.rms(total, w.norm),)

    return block


def run_parallel_branches(rank: int) -> list[Found]:
    x, _ = inputs(rank)
    return run(parallel_branches(rank), config(), x, torch.arange(TOKENS).view(1, -1) * 5 % 16)


def test_the_offset_of_a_rank_in_the_vocabulary_orders_nothing() -> None:
    """It is 0 on the first rank, where torch drops it: the graphs have different numbers of nodes."""
    for (each,) in run_ranks(run_parallel_branches, 2):
        assert each == Found((True,) * 2, ())


def run_own_readers(rank: int) -> list[Found]:
    """A sum without a norm, which the first rank reads once more."""
    w = forms.make_weights(torch.float32)

    def block(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        total = forms.all_reduce(x @ w.product)
        return (total.relu(), total.cos()) if rank == 0 else (total.relu(),)

    return run(block, config(), *inputs(rank))


def test_who_reads_a_sum_is_a_ranks_own_business() -> None:
    for (each,) in run_ranks(run_own_readers, 2):
        assert each == Found((True,), ())


def test_what_all_leave_is_left_where_nothing_was_rewritten_too() -> None:
    """A site can become worth it where its neighbour is left, on one rank alone, and nobody compares again."""
    sites = (("first", "tp", True), ("second", "tp", False), ("other", "dp", True))
    decisions = [
        SimpleNamespace(site=SimpleNamespace(id=name, groups=(group,)), rewritten=rewritten)
        for name, group, rewritten in sites
    ]
    state: Any = SimpleNamespace(decisions=decisions)
    agreement = agree._Agreement((), state, RULES, cast(Context, None), ("tp", "dp"), current_compile())
    why = Rejection("ranks_differ", "the graphs differ")
    assert agreement._take("tp", shared_facts.Verdict(all_left=why))
    assert agreement.left == {"first": why, "second": why}


def test_the_structure_of_a_graph_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of Python, as sizes are computed by, have other addresses there."""
    graph = fx.Graph()
    least = graph.call_function(torch.sym_min, (graph.placeholder("tokens"), 5))
    graph.output(graph.call_function(operator.mul, (least, 2)))
    monkeypatch.setattr(shared_facts, "digest", "\n".join)
    text = shared_facts.structure_of(graph)
    assert "sym_min" in text and "mul" in text and "0x" not in text


@pytest.mark.parametrize("case", CASES)
def test_where_nothing_is_rewritten_nothing_is_compared(case: str) -> None:
    for (each,) in run_ranks(run_case, 2, case, False):
        assert not any(each.rewritten) and not each.reasons and not each.fallbacks


def run_print(rank: int) -> tuple[int, list[Found], float]:
    w = forms.make_weights(torch.float32)

    def block(x: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        for layer in range(3):
            total = total + forms.all_reduce(x @ w.product)
            x = forms.rms(total, w.norm) @ w.after
            if rank == 0 and layer == 0:
                torch._dynamo.graph_break()
        return x, total

    began = time.monotonic()
    every = run(block, config(), *inputs(rank))
    took_s = time.monotonic() - began
    again = run(two_layers(rank), config(), *inputs(rank))
    return len(every), again, took_s


def test_a_graph_break_on_one_rank_stops_nobody() -> None:
    """The first rank's two graphs have the collectives of the other's one: all are left; the next one is rewritten."""
    (first, again, first_s), (second, other, second_s) = run_ranks(run_print, 2)
    assert (first, second) == (2, 1)
    assert again[0].rewritten == other[0].rewritten == (True, True)
    assert max(first_s, second_s) < 15.0, "far less than compile_timeout_s"


def run_failing_step(rank: int) -> list[Found]:
    if rank == 1:

        def fail(*arguments: object) -> object:
            raise ValueError("made up")

        module: object = planning
        setattr(module, "place", fail)  # noqa: B010
    return run(two_layers(rank), config(), *inputs(rank))


def test_a_step_that_fails_on_one_rank_leaves_the_graph_on_all() -> None:
    (first,), (second,) = run_ranks(run_failing_step, 2)
    assert not any(first.rewritten)
    assert first.fallbacks == ("bind: rank 1: step 'plan' failed: ValueError: made up",)
    assert second.fallbacks == ("plan: ValueError: made up",)


def run_other_options(rank: int) -> str:
    own = Config(force=(RULE,), max_tokens=64 if rank else 128, compile_timeout_s=60.0)
    with pytest.raises(RuntimeError) as told:
        run(two_layers(rank), own, *inputs(rank))
    return said(told.value)


def test_options_that_differ_under_rewriting_are_an_error() -> None:
    first, second = run_ranks(run_other_options, 2)
    assert (
        first == second
        and first.startswith("AgreementError: ")
        and "differ in option max_tokens: rank 0 has 128, rank 1 has 64" in first
    )


def run_own_files(rank: int, folder: str, errors: tuple[float, ...]) -> list[Found]:
    """Each rank has a folder, a profile's file and a log of its own."""
    profile = Path(folder) / f"rank{rank}.json"
    profile.write_text(cost_model.dumps(replace(cost_model.load("cpu"), relative_error=errors[rank])))
    own = replace(
        config(), machine=str(profile), tune_cache=f"{folder}/{rank}", inductor=(("trace.enabled", rank == 0),)
    )
    return run(two_layers(rank), own, *inputs(rank))


def test_where_a_ranks_files_are_is_its_own_business(tmp_path: Path) -> None:
    for (graph,) in run_ranks(run_own_files, 2, str(tmp_path), (0.06, 0.06)):
        assert graph.rewritten == (True, True)


def run_other_constants(rank: int, folder: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        run_own_files(rank, folder, (0.06, 0.07))
    return said(caught.value)


def test_profiles_that_differ_are_an_error_wherever_they_are(tmp_path: Path) -> None:
    for text in run_ranks(run_other_constants, 2, str(tmp_path)):
        assert text.startswith("AgreementError: ") and "differ in constants of the machine profile" in text


def run_mesh(rank: int, own: Config | None = None) -> tuple[list[Found], list[float]]:
    """TP 2 x DP 2: batches of each data-parallel rank's own sizes, a metric summed over the data-parallel group.

    With an `own` configuration kernels are timed.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    w = forms.make_weights(torch.float32)

    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + torch.distributed._functional_collectives.all_reduce(x @ w.product, "sum", tp)
        normalized = forms.rms(total, w.norm)
        loss = normalized.square().mean()
        return normalized, torch.distributed._functional_collectives.all_reduce(loss, "avg", dp)

    reports: list[GraphReport] = []
    config = own or Config(force=(RULE,))  # default timeouts
    compiled = torch.compile(step, backend=executing(config, reports, tunes=own is not None), dynamic=False)
    took = []
    sizes = ((3, 4, 3, 5, 4, 6), (3, 3, 3, 7, 7, 3))[rank // 2]
    with torch.no_grad():
        for tokens in sizes:
            began = time.monotonic()
            for got, want in zip(
                compiled(*inputs(rank, tokens=tokens)), step(*inputs(rank, tokens=tokens)), strict=True
            ):
                assert_close(got, want, LIBRARY)
            took.append(time.monotonic() - began)
    return [found(graph) for graph in reports], took


def test_data_parallel_ranks_have_batches_of_their_own() -> None:
    for graphs, took in run_ranks(run_mesh, 4, timeout_s=200):
        assert len(graphs) in (2, 4) and all(True in graph.rewritten for graph in graphs)
        assert max(took) < 20.0, took


def run_recompile_of_a_known_plan(rank: int, own: Config | None = None) -> list[bool]:
    """One rank's input has other strides in the third call: the plan is the same, the others do not compile.

    With an `own` configuration kernels are timed.
    """
    reports: list[GraphReport] = []
    block = two_layers(rank)
    backend = executing(own or config(), reports, tunes=own is not None)
    compiled = torch.compile(block, backend=backend, dynamic=False)
    with torch.no_grad():
        for call in range(5):
            x, residual = inputs(rank)
            if rank == 1 and call >= 2:
                x = x.transpose(1, 2).contiguous().transpose(1, 2)
            for got, want in zip(compiled(x, residual), block(x, residual), strict=True):
                assert_close(got, want, LIBRARY)
    return [all(found(graph).rewritten) for graph in reports]


def test_a_plan_that_was_agreed_needs_no_agreement_again() -> None:
    assert run_ranks(run_recompile_of_a_known_plan, 2) == [[True], [True, True]]


def run_recompile_of_another_plan(rank: int) -> tuple[str, float]:
    """One rank meets a guard after which its norm is another one, while the others go on."""
    reports: list[GraphReport] = []
    blocks = (two_layers(rank), two_layers(rank, plus_one=True))
    chosen = [0]

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return blocks[chosen[0]](x, residual)

    own = Config(force=(RULE,))  # default timeouts
    compiled = torch.compile(block, backend=executing(own, reports), dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            compiled(*inputs(rank))
        chosen[0] = int(rank == 1)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as told:
            compiled(*inputs(rank))
    return said(told.value), time.monotonic() - began


def test_a_rank_that_compiles_another_plan_alone_ends_all_ranks_early() -> None:
    (waited, first_s), (alone, second_s) = run_ranks(run_recompile_of_another_plan, 2)
    assert max(first_s, second_s) < 20.0, "120 s is the timeout of a call, 1800 s that of compiling"
    assert alone.startswith("AgreementError: group ") and "rank 1 compiled a graph alone" in alone
    assert "Dynamo compiled it again after a guard failed: 0/0: chosen[0] == 0" in alone
    assert waited.startswith("PeerTimeoutError: ") and "rank 1 compiled a graph alone" in waited
