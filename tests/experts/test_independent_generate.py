"""`weaveopt.generate` of independent ranks over which experts are spread: each generates as often as it likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weaveopt
from tests.experts.test_data_parallel import folder, ids_of, load, whole
from tests.ranks import run_ranks

__all__ = ["folder"]


def run_generate(rank: int, world: int, folder: Path, do_sample: bool) -> list[list[int]]:
    """Rank 1 generates three times, and rank 0 once, other numbers of tokens."""
    every, model = whole(folder, "mixtral"), load(folder, "mixtral", world, independent=True)
    weaveopt.share_experts(model)
    lengths = []
    for step in range(1 + 2 * rank):
        ids, found = ids_of(10 * rank + step, 3 + rank), []
        for each, more in ((every, {}), (model, {"custom_generate": weaveopt.generate})):
            torch.manual_seed(7 + step)
            new = 3 + step + rank
            found.append(each.generate(ids, max_new_tokens=new, do_sample=do_sample, pad_token_id=0, **more))
        assert torch.equal(*found), (rank, step)
        lengths.append(list(found[0].shape))
    return lengths


@pytest.mark.parametrize("do_sample", [False, True])
def test_independent_ranks_generate_by_themselves(folder: Path, do_sample: bool) -> None:
    found = run_ranks(run_generate, 2, 2, folder, do_sample, timeout_s=200)
    assert [len(each) for each in found] == [1, 3]
