"""A tensor-parallel model: every rank makes the same tokens, sampled ones too, whatever its own random state was."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

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


class _Watches(StoppingCriteria):
    """Stops nothing, as one that logs on the first rank does."""

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _one_leaves(rank: int, folder: str) -> list[list[str]]:
    model = load(LLAMA, folder, WORLD)
    inputs = ragged()
    wanted = theirs(model, inputs, max_new_tokens=6)
    for sampled in (False, True):
        own = {"stopping_criteria": StoppingCriteriaList([_Watches()])} if rank == 0 else {}
        torch.manual_seed(0)
        found = ours(model, inputs, max_new_tokens=6, do_sample=sampled, **own)
        assert sampled or torch.equal(found.sequences, wanted.sequences)  # type: ignore[attr-defined]
    left = weaveopt.report(model).generation.left
    assert_same(ours(model, inputs, max_new_tokens=6), wanted)
    return [[reason.code for reason in each.reasons] for each in left]


def test_all_ranks_leave_a_call_that_one_of_them_leaves(tmp_path: Path) -> None:
    """The two loops run the model in different sequences: its collectives would not be the same."""
    save(LLAMA, str(tmp_path))
    assert run_ranks(_one_leaves, WORLD, str(tmp_path)) == [[["stopping_criterion"]], [["ranks_differ"]]]


def test_ranks_make_the_same_tokens(tmp_path: Path) -> None:
    outcomes = run_ranks(_check, WORLD, str(tmp_path))
    first, again, num_forms = outcomes[0]
    assert first == again, "the first rank's seed decides"
    assert outcomes[1] == (first, again, num_forms) and num_forms == 2
