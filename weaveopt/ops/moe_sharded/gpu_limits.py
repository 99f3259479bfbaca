"""Sizes that the kernels of `expert_exchange` on GPUs count, and those they do not."""

from __future__ import annotations

from weaveopt.expert_kernels.gpu import MAX_CHOICES, MAX_EXPERTS

MOST_ROWS = 1 << 28
"""Choices of a rank's tokens: a row's slot in the combine buffer is a number of 28 bits."""
MOST_CHUNKS = 1 << 31
"""Most chunks of 8 elements in the rows of all ranks' tokens."""


def refusal(world: int, max_tokens: int, choices: int, experts: int, hidden: int) -> str:
    """Why the kernels do not take calls of up to `max_tokens` tokens a rank; empty where they do."""
    if experts > MAX_EXPERTS:
        return f"the kernels sort rows by up to {MAX_EXPERTS} experts of a rank"
    if choices > MAX_CHOICES:
        return f"the kernels take up to {MAX_CHOICES} choices of a token"
    if max_tokens * choices >= MOST_ROWS or world * max_tokens * (-(-hidden // 8)) >= MOST_CHUNKS:
        return (
            "the kernels count rows of the tokens' choices, and pieces of 16 bytes in the rows of all ranks, in 32 bits"
        )
    return ""
