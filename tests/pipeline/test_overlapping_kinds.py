"""Sites that share nodes are priced once a kind too, and exclude each other as they do by themselves."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graphs import forms
from tests.graphs.nonempty import some
from tests.graphs.traces import context_of, framed, traced
from weaveopt import cost_model
from weaveopt.pipeline.problem import ProblemTemplate
from weaveopt.rule import CapturedGraph
from weaveopt.solver.selection import EXCLUDED

HIDDEN, INNER = 8192, 1024


def blocks(columns: list[tuple[int, ...]], tokens: int = 4096) -> CapturedGraph:
    """All-reduce, addition and norm, then GEMMs of these columns by the normalized rows; once for each tuple."""

    def run(x: Tensor, total: Tensor, norm: Tensor, *weights: Tensor) -> Tensor:
        left = [*weights]
        for each in columns:
            total = total + forms.all_reduce(F.linear(x, left.pop(0)))
            rows = forms.rms(total, norm)
            read = [F.linear(rows, left.pop(0)) for _ in each]
            x = torch.cat([part.sin() for part in read], dim=-1)[:, :INNER].contiguous()
        return x + total[:, :INNER]

    shapes = [shape for each in columns for shape in ((HIDDEN, INNER), *((n, HIDDEN) for n in each))]
    return traced(run, [(tokens, INNER), (tokens, HIDDEN), (HIDDEN,), *shapes])


def frame_of(captured: CapturedGraph) -> ProblemTemplate:
    return framed(captured, context_of(captured, cost_model.load("h200x4")))


def kinds_of(frame: ProblemTemplate) -> list[tuple[str, int]]:
    return [(found.site.kind, kind) for found, kind in zip(frame.sites, frame.kinds, strict=True)]


def test_equal_blocks_are_of_one_kind() -> None:
    frame = frame_of(blocks([(1024, 512), (1024, 512), (1024, 512), (512, 1024), (1024, 512)]))
    kinds = kinds_of(frame)
    assert [kind for kind, _ in kinds] == ["reduction", "projections"] * 5
    reductions, projections = ([at for kind, at in kinds if kind == name] for name in ("reduction", "projections"))
    assert projections[:3] == [1, 1, 1] and reductions[:3] == [0, 0, 0]
    assert (reductions[3], projections[3]) == (6, 7), "of other columns"
    for reduction, projection in zip(reductions, projections, strict=True):
        assert projection == reduction + 1, "sites that share nodes are of the kinds of one pair"


def test_what_excludes_what_is_the_same_for_all_of_a_kind() -> None:
    captured = blocks([(1024, 512)] * 5)
    frame, apart = frame_of(captured), frame_of(captured)
    apart.kinds = tuple(range(len(apart.sites)))
    once, each = frame.problem(usable_only=True), apart.problem()
    assert len(set(frame.kinds)) < len(frame.sites)
    names = [
        [None if (p := site.proposal(choice)) is None else (p.candidate.choice, p.candidate.variant)
         for choice in range(site.num_choices)]
        for site in each.sites
    ]  # fmt: skip
    num_excluded = 0
    for mine, theirs in zip(some(once.exclusions), each.exclusions, strict=True):
        assert mine.sites == theirs.sites
        a, b = mine.sites
        usable = [
            [None if (p := once.sites[at].proposal(c)) is None else (p.candidate.choice, p.candidate.variant)
             for c in range(once.sites[at].num_choices)]
            for at in (a, b)
        ]  # fmt: skip
        excluded = {(usable[0][i], usable[1][j]) for (i, j), us in mine.terms.items() if us == EXCLUDED}
        expected = {(names[a][i], names[b][j]) for (i, j), us in theirs.terms.items() if us == EXCLUDED}
        assert excluded == expected & set(product(*usable))
        num_excluded += len(excluded)
    assert num_excluded, "no rule takes the GEMMs with the sum"
    best, chosen = once.best(), each.best()
    for index, (mine, theirs) in enumerate(zip(best, chosen, strict=True)):
        taken = once.sites[index].proposal(mine)
        assert names[index][theirs] == (None if taken is None else (taken.candidate.choice, taken.candidate.variant))


def test_a_model_of_many_layers_is_priced_once_a_kind() -> None:
    frame = frame_of(blocks([(1024, 512)] * 40, tokens=64))
    assert len(frame.sites) == 80 and len(set(frame.kinds)) <= 8, len(set(frame.kinds))
