"""What the server loads that ranks are forked from: once for all tests, before it has any thread.

Each rank that loaded these by itself would spend more on that than on most tests.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401  (every test file)
import torch._inductor.compile_fx  # noqa: F401
import transformers.modeling_utils  # noqa: F401

import weaveopt.backend
import weaveopt.ops  # noqa: F401

gc.collect()
# Ranks never look through what they share with the server, so its pages stay shared.
gc.freeze()
gc.set_threshold(100_000, 20, 50)
