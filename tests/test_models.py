"""Every family, on real ranks: one graph, all-reduces rewritten or with a reason, logits and tokens as eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.executing import FORCED, executing
from tests.models import FAMILIES, VOCABULARY, Family, load, save
from tests.ranks import run_ranks
from weaveopt.records.report import GraphReport

WORLD = 2
NUM_PARTS = 4
"""Families are spread over so many spawns: starting ranks and importing transformers costs seconds."""


def _greedy(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return model.generate(  # type: ignore[operator, no-any-return]
        ids, max_new_tokens=num_tokens, do_sample=False, cache_implementation="static", disable_compile=True
    )


def _check(rank: int, families: tuple[Family, ...], folder: str) -> list[str]:
    problems: list[str] = []
    for family in families:
        path = f"{folder}/{family.id}"
        if rank == 0:
            save(family, path)
        dist.barrier()
        problems.extend(f"{family.id}: {problem}" for problem in _problems(family, path))
    return problems


def _problems(family: Family, path: str) -> list[str]:
    model = load(family, path, WORLD)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    problems: list[str] = []
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        tokens = _greedy(model, ids, 6)
        model.compile(backend=executing(FORCED, reports), dynamic=False)
        got = model(ids, use_cache=False).logits
        num_graphs = len(reports)
        got_tokens = _greedy(model, ids, 6)
    if not torch.allclose(got, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max())):
        problems.append(f"logits differ by {(got - logits).abs().max():.2e} of {logits.abs().max():.2e}")
    if not torch.equal(got_tokens, tokens):
        problems.append(f"tokens {got_tokens.tolist()} instead of {tokens.tolist()}")
    if {"prefill", "decode"} - {report.phase for report in reports} and family.id != "gpt_oss":
        problems.append(f"phases {[report.phase for report in reports]}")
    if num_graphs != 1:
        problems.append(f"{num_graphs} graphs: {dict(torch._dynamo.utils.counters['graph_break'])}")
    for report in reports:
        left = [d for d in report.decisions if not d.rewritten]
        if len(left) > family.num_left or any(not d.site.rejections for d in left):
            reasons = [(d.site.module, [r.code for r in d.site.rejections]) for d in left]
            problems.append(f"{report.phase}: {len(left)} sites left, expected at most {family.num_left}: {reasons}")
    return problems


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_family_computes_as_eager(part: int, tmp_path: Path) -> None:
    families = FAMILIES[part::NUM_PARTS]
    problems = run_ranks(_check, WORLD, families, str(tmp_path), timeout_s=420)
    assert problems == [[]] * WORLD


def _symbolic(rank: int, family: Family, folder: str) -> tuple[int, int, list[str]]:
    """With `dynamic=True` sizes are symbolic, and so are eps and every multiplier of the configuration."""
    if rank == 0:
        save(family, folder)
    dist.barrier()
    model = load(family, folder, WORLD)
    requests = [torch.randint(3, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n)) for n in (9, 12)]
    reports: list[GraphReport] = []
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = [model(ids, use_cache=False).logits for ids in requests]
        model.compile(backend=executing(FORCED, reports), dynamic=True)
        for ids, want in zip(requests, wanted, strict=True):
            torch.testing.assert_close(model(ids, use_cache=False).logits, want, rtol=1e-4, atol=1e-4)
    left = [r.code for report in reports for d in report.decisions for r in d.site.rejections]
    return len(reports), sum(report.num_rewritten for report in reports), left


def test_symbolic_floats_of_a_family_are_numbers(tmp_path: Path) -> None:
    """Granite has an eps, a multiplier of the embedding and one of each residual; two sites a layer, and the first."""
    granite = next(family for family in FAMILIES if family.id == "granite")
    assert run_ranks(_symbolic, WORLD, granite, str(tmp_path), timeout_s=300) == [(1, 5, [])] * WORLD
