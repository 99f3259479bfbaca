"""Top-k and top-p of a decode step on one GPU: weave's, without a sort of the vocabulary, beside transformers'.

    python -m benchmarks.next_token_gpu --machine h100x2 [--batches 1 2 4 16 64] [--no-write]

Suite `next_token`: float32 scores of a vocabulary of 128256, k = 50, p = 0.95. Ours is compiled by Inductor, as a step
is, theirs runs as transformers' loop has it; both are in CUDA graphs and take turns. Parameters hold what a search for
the k largest alone takes by each way that was tried: torch's of the whole row, by parts of a row, and by sorted parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TopKLogitsWarper, TopPLogitsWarper

from benchmarks import record
from benchmarks.moe_experts_cases import NUM_ROUTINGS, capture, time_in_turns
from weaveopt.generation import nucleus

SUITE = "next_token"
VOCABULARY, K, P = 128256, 50, 0.95
BATCHES = (1, 2, 4, 16, 64)
PARTS = (32, 64, 128)
SORTED = (1024, 2048, 4096)
"""Scores of a part: torch sorts rows of up to 4096 by one block of threads each."""


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


def row_of(batch: int) -> record.Row:
    generator = torch.Generator("cuda").manual_seed(batch)
    sets = [torch.randn(batch, VOCABULARY, device="cuda", generator=generator) for _ in range(NUM_ROUTINGS)]
    scores = sets[0]
    searches: dict[str, Callable[[Tensor], Tensor]] = {"largest_whole": whole}
    searches |= {f"largest_{parts}_parts": partial(by_parts, parts=parts) for parts in PARTS}
    searches |= {f"largest_sorted_{size}": partial(by_sorted_parts, size=size) for size in SORTED}
    for name, search in searches.items():
        assert torch.equal(search(scores), whole(scores)), name
    chosen = {"weave": torch.compile(ours, dynamic=False), "transformers": theirs}
    assert torch.equal(chosen["weave"](scores), chosen["transformers"](scores)), f"{batch} rows keep other tokens"
    graphs = {name: capture(lambda at, way=way: way(sets[at])) for name, way in {**searches, **chosen}.items()}  # type: ignore[misc]
    us = time_in_turns(graphs)
    return record.row(
        case={"batch": batch, "vocabulary": VOCABULARY, "top_k": K, "top_p": P, "dtype": "float32"},
        weave_us=us["weave"], baselines={"transformers": us["transformers"]},
        parameters={f"{name}_us": round(us[name], 1) for name in searches},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="gpu", help="folder of benchmarks/results that the figures go to")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    rows = []
    for batch in asked.batches:
        torch._dynamo.reset()
        rows.append(row_of(batch))
        told = ", ".join(f"{name.removesuffix('_us')} {value}" for name, value in rows[-1].parameters.items())
        print(f"{batch:3}: weave {rows[-1].weave_us:.1f} us, {rows[-1].ratio:.2f} of transformers; {told}", flush=True)
    if not asked.no_write:
        print(record.write(SUITE, asked.machine, rows))


if __name__ == "__main__":
    main()
