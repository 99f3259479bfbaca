"""`key_ranges` and `join_ranges`, run by Triton's interpreter: `TRITON_INTERPRET=1 python -m` this file.

Prints a line of JSON for each number of keys: the number, how many masks were compared, and what was wrong or null.
"""

from __future__ import annotations

import json
import random

import torch

from tests.emulation.triton_interpreter import interpreting
from tests.graphs.attention_cases import LOOKS, Sizes, make_mask
from weaveopt.ops.attention.gpu import launch_key_ranges
from weaveopt.ops.attention.reference import key_ranges

KEYS = (1, 127, 129, 300)
QUERIES = (1, 5, 130)


def masks(keys: int, queries: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Masks as models make them, and some in which all queries admit a run of keys that blocks of keys cut."""
    found = {look: make_mask(look, Sizes(batch=2, queries=queries, keys=keys), generator) for look in LOOKS[1:]}
    choice = random.Random(keys * queries)
    for number in range(4):
        mask = torch.rand((1, 2, queries, keys), generator=generator) < choice.choice([0.0, 0.5, 0.98])
        begin = choice.randrange(keys)
        mask[:, number % 2, :, begin : begin + choice.choice([1, 100, 128, 256, 500])] = True
        found[f"run {number}"] = mask.transpose(2, 3).contiguous().transpose(2, 3) if number == 3 else mask
    return {name: mask for name, mask in found.items() if mask is not None}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for keys in KEYS:
        wrong, compared = None, 0
        for queries in QUERIES:
            if queries > keys:
                continue
            for name, mask in masks(keys, queries, generator).items():
                rows = 16 if compared % 3 == 0 else 128
                got, want = launch_key_ranges(mask, rows), key_ranges(mask, rows)
                compared += 1
                if wrong is None and not torch.equal(got, want):
                    wrong = f"{name}, {queries} x {keys}, {rows} rows: {got.tolist()}, expected {want.tolist()}"
        print(json.dumps({"keys": keys, "compared": compared, "wrong": wrong}))


if __name__ == "__main__":
    with interpreting():
        main()
