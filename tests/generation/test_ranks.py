"""A tensor-parallel model: every rank makes the same tokens, sampled ones too, whatever its own random state was."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import weaveopt
from tests.graphs.generating import assert_same, ours, ragged, theirs
from tests.graphs.models import FAMILIES, load, save
from tests.ranks import run_ranks

WORLD = 2
LLAMA = next(family for family in FAMILIES if family.name == "llama")


def _check(rank: int, folder: str) -> tuple[list[list[int]], list[list[int]], int]:
    if rank == 0:
        save(LLAMA, folder)
    dist.barrier()
    model = load(LLAMA, folder, WORLD)
    inputs = ragged()
    assert_same(ours(model, inputs, max_new_tokens=6), theirs(model, inputs, max_new_tokens=6))
    torch.manual_seed(rank)
    first = ours(model, inputs, do_sample=True, max_new_tokens=6).sequences  # type: ignore[attr-defined]
    torch.manual_seed(0)
    again = ours(model, inputs, do_sample=True, max_new_tokens=6).sequences  # type: ignore[attr-defined]
    report = weaveopt.report(model).generation
    assert not report.left
    return first.tolist(), again.tolist(), len(report.steps)


def test_ranks_make_the_same_tokens(tmp_path: Path) -> None:
    outcomes = run_ranks(_check, WORLD, str(tmp_path))
    first, again, num_forms = outcomes[0]
    assert first == again, "the first rank's seed decides"
    assert outcomes[1] == (first, again, num_forms) and num_forms == 2
