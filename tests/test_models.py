"""Every family, on real ranks: one graph, whose all-reduces are rewritten; logits and tokens as eager."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.executing import FORCED, executing
from tests.models import FAMILIES, VOCABULARY, Family, load, save
from tests.ranks import run_ranks
from weaveopt.records.report import GraphReport

WORLD = 2
NUM_TOKENS = 3
"""One by the prefill, and two by the same decode graph: where a family's window moves, a graph for each step."""
NUM_PARTS = 4
"""Families are spread over so many spawns: starting ranks and importing transformers costs seconds."""


@dataclass(frozen=True)
class _Generated:
    tokens: torch.Tensor
    logits: torch.Tensor
    """Of every new token, the first of them by the prefill."""


def _greedy(model: torch.nn.Module, ids: torch.Tensor) -> _Generated:
    found = model.generate(  # type: ignore[operator]
        ids, max_new_tokens=NUM_TOKENS, do_sample=False, cache_implementation="static", disable_compile=True,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return _Generated(found.sequences, torch.stack(found.logits))


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
    torch._dynamo.utils.counters.clear()
    problems: list[str] = []
    with torch.no_grad():
        eager = _greedy(model, ids)
        model.compile(backend=executing(FORCED, reports), dynamic=False)
        got = _greedy(model, ids)
    if not torch.equal(got.tokens, eager.tokens):
        problems.append(f"tokens {got.tokens.tolist()} instead of {eager.tokens.tolist()}")
    elif not torch.allclose(got.logits, eager.logits, rtol=1e-4, atol=1e-4 * float(eager.logits.abs().max())):
        off, largest = (got.logits - eager.logits).abs().max(), eager.logits.abs().max()
        problems.append(f"logits differ by {off:.2e} of {largest:.2e}")
    if {"prefill", "decode"} - {report.phase for report in reports} and family.id != "gpt_oss":
        problems.append(f"phases {[report.phase for report in reports]}")
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    if breaks:
        problems.append(f"more than one graph a call: {breaks}")
    for report in reports:
        left = [d for d in report.decisions if not d.rewritten]
        if left:
            reasons = [(d.site.module, [r.code for r in d.site.rejections]) for d in left]
            problems.append(f"{report.phase}: {len(left)} sites left: {reasons}")
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
