"""Top-k and top-p of a decode step on one GPU: weave's, without a sort of the vocabulary, against transformers'.

float32 scores of a vocabulary of 128256, k = 50, p = 0.95. Ours is compiled by Inductor, as a step is, theirs runs as
transformers' loop has it. Parameters hold what a search for the k largest alone takes by each algorithm: torch's of the
whole row, by parts of a row, and by sorted parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TopKLogitsWarper, TopPLogitsWarper

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import GPU, Asked, Needs, Setting, Suite
from benchmarks.timing import Effort, Step, replayed_us
from weaveopt.generation import nucleus

VOCABULARY, K, P = 128256, 50, 0.95
BATCHES = Setting("batches", (1, 2, 4, 16, 64), quick=(2,))
NUM_INPUTS = 8
PARTS = (32, 64, 128)
SORTED = (1024, 2048, 4096)
"""Scores of a part: torch sorts rows of up to 4096 by one block of threads each."""


@dataclass(frozen=True)
class Case:
    batch: int


def whole(scores: Tensor) -> Tensor:
    return scores.topk(K).values


def by_parts(scores: Tensor, parts: int) -> Tensor:
    size = -(-VOCABULARY // parts)
    return _of_parts(scores, size, lambda rows: rows.topk(K, sorted=False).values)


def by_sorted_parts(scores: Tensor, size: int) -> Tensor:
    return _of_parts(scores, size, lambda rows: rows.sort(dim=-1, descending=True).values[:, :K])


def _of_parts(scores: Tensor, size: int, largest: Callable[[Tensor], Tensor]) -> Tensor:
    batch, parts = scores.shape[0], -(-VOCABULARY // size)
    rows = pad(scores, (0, size * parts - VOCABULARY), value=float("-inf")).view(batch * parts, size)
    return largest(rows).reshape(batch, parts * K).topk(K).values


def theirs(scores: Tensor) -> Tensor:
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.int64, device=scores.device)
    return TopPLogitsWarper(P)(ids, TopKLogitsWarper(K)(ids, scores))  # type: ignore[arg-type]


def ours(scores: Tensor) -> Tensor:
    return torch.where(nucleus.kept(scores, K, P, 1), scores, float("-inf"))


def row_of(place: Place, batch: int) -> record.Row:
    generator = torch.Generator("cuda").manual_seed(batch)
    sets = [torch.randn(batch, VOCABULARY, device="cuda", generator=generator) for _ in range(NUM_INPUTS)]
    scores = sets[0]
    searches: dict[str, Callable[[Tensor], Tensor]] = {"largest_whole": whole}
    searches |= {f"largest_{parts}_parts": partial(by_parts, parts=parts) for parts in PARTS}
    searches |= {f"largest_sorted_{size}": partial(by_sorted_parts, size=size) for size in SORTED}
    for name, search in searches.items():
        assert torch.equal(search(scores), whole(scores)), name
    chosen = {"weave": torch.compile(ours, dynamic=False), "transformers": theirs}
    assert torch.equal(chosen["weave"](scores), chosen["transformers"](scores)), f"{batch} rows keep other tokens"

    def over_all(way: Callable[[Tensor], Tensor]) -> Step:
        def step() -> None:
            for each in sets:
                way(each)

        return step

    steps = {name: over_all(way) for name, way in {**searches, **chosen}.items()}
    us = replayed_us(place, steps, Effort(9, 1), len(sets))
    return record.row(
        case={"batch": batch, "vocabulary": VOCABULARY, "top_k": K, "top_p": P, "dtype": "float32"},
        weave_us=us["weave"], baselines={"transformers": us["transformers"]},
        parameters={f"{name}_us": round(us[name], 1) for name in searches},
    )  # fmt: skip


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    for case in cases:
        torch._dynamo.reset()
        yield row_of(place, case.batch)


SUITES = (
    Suite(
        "next_token", "top-k and top-p of a decode step", Needs(GPU, worlds=(1,)),
        lambda asked: [Case(batch) for batch in asked.of(BATCHES)], rows, ours=("weave",), baselines=("transformers",),
        settings=(BATCHES,),
    ),
)  # fmt: skip
