"""Triton kernels compiled for GPUs with less shared memory than Hopper's, by the plans of those: `python -m` this file.

Prints a line of JSON for each kernel: of which case, the shared memory that it takes, and how much there is.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from unittest import mock

import torch

from tests.emulation.experts_compiled import CASES, operands_of
from tests.emulation.triton_compiler import Compiled, only_compile
from weaveopt.cost_model import Attention
from weaveopt.measure.cases.attention.paged import paged_operands
from weaveopt.ops.attention import gpu, paged_gpu
from weaveopt.ops.attention.shapes import RANGE_ROWS, AttentionOperands, Scores
from weaveopt.ops.experts import gpu as experts_gpu
from weaveopt.ops.experts.plan import plan

CAPABILITY, MOST_BYTES, NUM_SMS = 89, 99 * 1024, 128
"""An RTX 4090's; an L40S and an A10 have as much."""
SCORES = Scores(0.1)
PAGED = {
    "paged decode": Attention(31, 16, 4, 1, 512, 128, "bfloat16"),
    "paged decode of few": Attention(2, 32, 8, 1, 900, 128, "bfloat16"),
    "paged prompts": Attention(2, 32, 8, 640, 640, 128, "bfloat16"),
    "paged mixed": Attention(9, 32, 8, 9, 300, 128, "bfloat16"),
    "paged wide": Attention(2, 8, 4, 64, 300, 256, "bfloat16"),
}
MASKED = {
    "decode": (15, 16, 8, 1, 512, 128),
    "decode of few": (1, 32, 8, 1, 4096, 128),
    "prefill": (1, 32, 8, 1024, 1024, 128),
    "wide prefill": (1, 16, 8, 1024, 1024, 256),
    "wide decode": (2, 8, 4, 1, 600, 256),
    "padded": (2, 8, 4, 16, 300, 80),
}
"""Batch, heads, key heads, queries, keys, size of a head."""


def main() -> None:
    from weaveopt.ops.attention import kernels, paged_kernels
    from weaveopt.ops.experts import kernels as expert_kernels
    from weaveopt.ops.experts import routing_kernels

    made: list[Compiled] = []
    watched = {"attention": kernels.attention, "paged_attention": paged_kernels.paged_attention}
    watched |= {name: getattr(expert_kernels, name) for name in ("gate_up", "down")}
    others = {"combine": kernels.combine, "sums": expert_kernels.combine, "route": routing_kernels.route}
    only_compile({**watched, **others}, made.append, CAPABILITY)

    def say(case: str) -> None:
        for kernel in made:
            if kernel.kernel in watched:
                print(json.dumps({"case": case, "kernel": kernel.kernel, "shared_bytes": kernel.shared_bytes,
                                  "most_bytes": MOST_BYTES}), flush=True)  # fmt: skip
        made.clear()

    cpu = torch.device("cpu")
    with ExitStack() as patched:
        for each in (gpu, paged_gpu):
            patched.enter_context(mock.patch.object(each, "num_sms", lambda _: NUM_SMS))
            patched.enter_context(mock.patch.object(each, "shared_bytes", lambda _: MOST_BYTES))
        for case, attention in PAGED.items():
            paged_gpu.attend(paged_operands(attention, cpu), SCORES)
            say(case)
        for case, (batch, heads, key_heads, queries, keys, size) in MASKED.items():
            query = torch.zeros(batch, heads, queries, size, dtype=torch.bfloat16)
            key = torch.zeros(batch, key_heads, keys, size, dtype=torch.bfloat16)
            for mask in (torch.ones(1, 1, queries, keys, dtype=torch.bool), None):
                ranges = None if mask is None else torch.zeros(1, 1, -(-queries // RANGE_ROWS), 4, dtype=torch.int32)
                gpu.masked_attention(AttentionOperands(query, key, key, mask, ranges), SCORES)
                say(case + (", mask" if mask is not None else ""))
        for case, (shape, call) in CASES.items():
            how = plan(shape, NUM_SMS, call.gated, MOST_BYTES)
            experts_gpu.launch(operands_of(shape, call), call, how)
            say(f"experts, {case}")


if __name__ == "__main__":
    main()
