"""`paged_attention`, run by Triton's interpreter: `TRITON_INTERPRET=1 python -m` this file.

Prints a line of JSON for each look of the requests: how many calls were compared, and what was wrong or null.
"""

from __future__ import annotations

import itertools
import json

import torch

from tests.emulation.triton_interpreter import interpreting
from tests.graphs.paged_cases import SPANS, PagedCase, expected, make
from tests.graphs.tolerances import KERNEL, assert_close
from tests.ranks.simulated import TEST_ALL
from weaveopt.ops.attention.paged_gpu import PagedLaunch, launch_paged
from weaveopt.ops.attention.shapes import Scores

SCORES = (Scores(0.25), Scores(0.125, softcap=3.0))
DTYPES = (torch.float16, torch.bfloat16)


def main() -> None:
    for look, spans in SPANS.items():
        wrong, compared = None, 0
        cases = [
            PagedCase(spans),
            PagedCase(spans, heads=6, key_heads=2, size=24, sinks=True),
            PagedCase(spans, window=6, heads=2, key_heads=2),
            PagedCase(spans, window=6, sinks=True, padding=0),
        ]
        if look == "prompts":
            cases += [PagedCase(spans, reads=False), PagedCase(spans, reads=False, heads=6, window=3)]
        counts = (1, 3) if look in ("mixed", "prompts") else (2,)
        turns = look == "prompts" and not TEST_ALL  # numbers of splits, one for each case
        runs = zip(cases, itertools.cycle(counts)) if turns else itertools.product(cases, counts)
        for number, (case, splits) in enumerate(runs):
            scores, dtype = SCORES[number % 3 == 2], DTYPES[number // 2 % 2]
            operands = make(case, dtype, number)
            want = expected(case, operands, scores).to(dtype)
            if not operands.rows.reads_first:
                operands.rows.write()
            group = operands.group
            block_m = 16 if number % 4 else 32
            how = PagedLaunch(block_m, block_m // group, 16, splits, inner=number % 3 != 1)
            got = launch_paged(operands, scores, how)
            compared += 1
            try:
                assert_close(got, want, KERNEL, f"{case} {scores} {dtype} {how}")
                assert not got[:, :, sum(each for each, _ in spans) :].any(), f"{case}: padding is not 0"
            except AssertionError as error:
                wrong = wrong or str(error)
        print(json.dumps({"look": look, "compared": compared, "wrong": wrong}))


if __name__ == "__main__":
    with interpreting():
        main()
