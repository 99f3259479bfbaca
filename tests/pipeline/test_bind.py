"""A graph whose arena cannot be had runs as it was, on all ranks that share a group with one that has none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.graphs import forms
from tests.graphs.executing import executing
from tests.graphs.functional_collectives import all_gather_single
from tests.graphs.tolerances import LIBRARY, assert_close
from tests.ranks import run_ranks
from weaveopt import _native
from weaveopt.config import Config
from weaveopt.errors import AgreementError, WeaveError
from weaveopt.fabrics import shm
from weaveopt.pipeline import bind as binding
from weaveopt.pipeline.bind import unrewritten
from weaveopt.records.candidate import LEAVE, Candidate, Estimate, Term
from weaveopt.records.report import Decision, GraphReport, Variant
from weaveopt.records.site import Site, TokenCounts

RULE = "all_reduce_rms_norm"
TIMEOUT_S = 60.0


def options(strict: bool = False) -> dict[str, object]:
    return {"force": [RULE], "strict": strict, "timeout_s": 20.0, "compile_timeout_s": TIMEOUT_S}


def deny_peers() -> None:
    """As in a container where a process may not open the files of another: ptrace scope, hidepid, another user."""

    def denied(pid: int, fd: int, cookie: int, num_bytes: int) -> object:
        raise RuntimeError(f"cannot open /proc/{pid}/fd/{fd}: Permission denied")

    segment = SimpleNamespace(create=_native.Segment.create, open=denied)
    module: object = shm
    setattr(module, "_native", SimpleNamespace(Segment=segment, Group=_native.Group))  # noqa: B010


def count_reservations() -> list[int]:
    counted: list[int] = []
    module: object = shm
    reserve = shm.reserve

    def counting(*arguments: object) -> object:
        counted.append(1)
        return reserve(*arguments)  # type: ignore[arg-type]

    setattr(module, "reserve", counting)  # noqa: B010
    return counted


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    residual = torch.randn(1, tokens, forms.HIDDEN, generator=torch.Generator().manual_seed(9))
    return torch.randn(1, tokens, forms.INNER, generator=torch.Generator().manual_seed(seed)), residual


def run_denied(rank: int) -> tuple[str, ...]:
    """One rank may not open the others' memory; what the graphs' fallbacks say."""
    import weaveopt

    weights = forms.make_weights(torch.float32)
    tried = count_reservations()
    if rank == 1:
        deny_peers()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return forms.pre_norm(weights, x, residual)

    def compiled(strict: bool) -> object:
        torch._dynamo.reset()
        return torch.compile(block, backend="weave", dynamic=False, options=options(strict))  # type: ignore[call-overload]

    with torch.no_grad():
        run = compiled(strict=False)
        for tokens in (64, 128, 1):  # static graphs: one as large as the one that failed or larger, and a smaller one
            for got, want in zip(run(*inputs(tokens, rank)), block(*inputs(tokens, rank)), strict=True):  # type: ignore[operator]
                assert_close(got, want, LIBRARY, f"{tokens} tokens")
        before = weaveopt.report()  # the reset drops its graphs
        with pytest.raises(WeaveError, match=r"step 'bind' failed on graph3: ArenaError: .*Permission denied"):
            compiled(strict=True)(*inputs(200, rank))  # type: ignore[operator]
    assert len(tried) == 2, "larger ones are not tried again"
    graphs = (*before.graphs, *weaveopt.report().graphs)
    for graph in graphs:
        (decision,) = graph.decisions
        assert decision.chosen.choice == LEAVE and graph.plans == () and graph.num_rewritten == 0
        assert graph.predicted_us == graph.unfused_us > 0 and graph.rounding == ()
        refused = [each for each in decision.alternatives if "not_bound" in {why.code for why in each.rejections}]
        assert [each.choice for each in refused] == [RULE]
    assert "fallback: graph graph0 runs unrewritten, step bind: ArenaError" in before.full()
    return tuple(f"{fallback.step}: {fallback.error}" for graph in graphs for fallback in graph.fallbacks)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_fall_back_where_one_may_not_share_memory(world: int) -> None:
    said = run_ranks(run_denied, world, timeout_s=300)
    assert len(set(said)) == 1, "every rank has the same reason"
    first, second, third, _ = said[0]
    assert "rank 1: the memory of rank 0: cannot open /proc/" in first and "Permission denied" in first
    assert second == f"{first} (not tried again)" and "Permission denied" in third and "again" not in third


def run_mesh(rank: int) -> tuple[tuple[str, ...], list[int]]:
    """Rows and columns of a mesh; the ranks of one row can share no memory. Rewritten sites are in rows only, so the
    other row runs its own."""
    import weaveopt

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    weights = forms.make_weights(torch.float32)
    if rank == 1:
        deny_peers()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + functional.all_reduce(x @ weights.product, "sum", tp)
        normalized = forms.rms(total, weights.norm)
        return total, normalized, functional.all_reduce(normalized.square(), "max", dp)

    with torch.no_grad():
        compiled = torch.compile(block, backend="weave", options=options())  # type: ignore[call-overload]
        for got, want in zip(compiled(*inputs(3, rank)), block(*inputs(3, rank)), strict=True):
            assert_close(got, want, LIBRARY)
    (graph,) = weaveopt.report().graphs
    assert [fallback.step for fallback in graph.fallbacks] == (["bind"] if rank < 2 else []), graph.fallbacks

    # A chain of pairs, the last of which fails: through all of them, and of two reasons the same everywhere.
    pairs = [dist.new_group([at, at + 1]) for at in range(3)]
    names = [pair.group_name for at, pair in enumerate(pairs) if rank in (at, at + 1)]
    assert binding._spread(f"{rank}: no memory" if rank > 1 else "", sorted(names), TIMEOUT_S) == "2: no memory"
    assert binding._spread("", sorted(names), TIMEOUT_S) == ""
    return tuple(fallback.error for fallback in graph.fallbacks), [d.rewritten for d in graph.decisions]


def test_ranks_that_share_no_rewritten_site_with_a_rank_without_memory_go_on() -> None:
    found = run_ranks(run_mesh, 4, timeout_s=300)
    errors = [error for error, _ in found]
    assert errors[0] == errors[1] and "rank 1: the memory of rank " in str(errors[0])
    assert errors[2:] == [(), ()]
    assert [True in rewritten for _, rewritten in found] == [False, False, True, True]


def test_groups_that_overlap_too_far_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(group: str, document: dict[str, str], what: str, timeout_s: float) -> tuple[dict[str, str], ...]:
        return document, {"why": "no memory" if what.startswith("whether") else ""}

    monkeypatch.setattr(binding, "_gather", gather)
    known = SimpleNamespace(group=SimpleNamespace(ranks=(4, 6)))
    monkeypatch.setattr(binding.topology, "discover", lambda group, timeout_s: known)
    settled: list[str] = []
    channel = SimpleNamespace(settle=lambda: settled.append("once"))
    monkeypatch.setattr(binding.topology, "exchange", lambda group, timeout_s: channel)
    with pytest.raises(AgreementError, match=r"group 'a': ranks \[6\] of \(4, 6\) have to leave .*\(no memory\)"):
        binding._spread("", ["a"], TIMEOUT_S)
    assert settled == ["once"], "rank 4 may have the store"


def test_the_report_of_an_unbound_graph_says_what_ran() -> None:
    def estimate(us: float) -> Estimate:
        return Estimate((Term("kernel", us),))

    site = Site("s0", "reduction", ("0",), "down", tokens=TokenCounts(4))
    leave, taken = Candidate(LEAVE, estimate=estimate(9.0)), Candidate(RULE, estimate=estimate(5.0))
    decision = Decision(site, taken, (leave,), estimate(9.0))
    untouched = Decision(replace(site, id="s1"), leave, (), estimate(9.0))
    captured = SimpleNamespace(
        decisions=(decision, untouched), priced=SimpleNamespace(work=(), captured=SimpleNamespace(variant="captured"))
    )
    variants = (Variant("captured", "", 30.0, 25.0), Variant("split", "token_split", 28.0, 20.0))
    report = GraphReport("g", "prefill", 4, (decision,), variants=variants, variant="split")
    found = unrewritten(report, captured, "ArenaError: none")  # type: ignore[arg-type]
    assert [d.chosen for d in found.decisions] == [leave, leave] and found.decisions[1] is untouched
    assert found.predicted_us == found.unfused_us == 18.0 and found.variant == "captured"
    assert [v.predicted_us for v in found.variants] == [30.0, 20.0]
    assert [why.code for why in found.variants[1].rejections] == ["not_bound"]
    assert [(f.step, f.error) for f in found.fallbacks] == [("bind", "ArenaError: none")]
    assert unrewritten(report, None, "none").fallbacks


def run_own_batches(rank: int) -> tuple[int, str]:
    """Data parallel: each rank has sequences of its own lengths, so each compiles at times of its own."""
    reports: list[GraphReport] = []

    def step(x: Tensor) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        embeddings = all_gather_single(attended.mean((1, 2)), 0, dist.group.WORLD)
        return functional.all_reduce(embeddings.square().sum(), "sum", dist.group.WORLD)

    compiled = torch.compile(step, backend=executing(Config(compile_timeout_s=10.0), reports))
    with torch.no_grad():
        for length in ((3, 5, 6), (3, 3, 3))[rank]:
            x = torch.ones(1, 2, length, 16)
            torch.testing.assert_close(compiled(x), step(x))
    return len(reports), " ".join(sorted({d.site.kind for report in reports for d in report.decisions}))


def test_ranks_with_batches_of_their_own_compile_at_times_of_their_own() -> None:
    """Nothing that communicates could be rewritten, so no rank waits for a rank that has nothing to compile."""
    (many, _), (one, kinds) = run_ranks(run_own_batches, 2, timeout_s=120)
    assert (many, one) == (2, 1) and "attention" in kinds, "the second rank compiled once, with a site in the graph"
