"""Times of the strongest peer at small sizes, for a column beside ours. They come from another run: never a baseline.

FlashInfer 0.7.2 `trtllm_allreduce_fusion` (all-reduce + residual + RMSNorm, bf16, 4 x H200, fp32 accumulation, PDL on,
CUDA graph), measured 2026-11-20 on the same host; the faster of its one-shot and its two-shot form.
"""

from __future__ import annotations

FLASHINFER_WORLD = 4
_ONE_SHOT_US = {
    8192: (5.81, 6.19, 6.53, 7.11, 8.33, 10.50, 15.26, 25.1, 48.0, 93.7, 187.0, 373.0),
    4096: (5.10, 5.43, 5.75, 5.96, 6.64, 7.87, 10.08, 14.05, 24.2, 49.4, 101.0, 201.0),
}
"""Times by hidden size: at 1, 2, 4, … 2048 tokens."""
_TWO_SHOT_US = {
    8192: (17.1, 17.5, 18.6, 22.9, 27.5, 37.5, 62.5, 114.0, 219.0),
    4096: (15.4, 15.2, 15.6, 16.7, 21.1, 24.0, 32.9, 64.0, 121.0),
}
"""At 8, 16, … 2048 tokens."""


def flashinfer(hidden: int, tokens: int) -> float | None:
    """Microseconds of the faster form, or None where it was not measured."""
    found = [
        times[hidden][tokens.bit_length() - 1 - skipped]
        for times, skipped in ((_ONE_SHOT_US, 0), (_TWO_SHOT_US, 3))
        if hidden in times and tokens.bit_count() == 1 and 0 <= tokens.bit_length() - 1 - skipped < len(times[hidden])
    ]
    return min(found, default=None)
