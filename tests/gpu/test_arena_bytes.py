"""Outgrown arenas of GPUs are given back, and kept where captured graphs hold them; `arena_bytes` makes room."""

from __future__ import annotations

import sys

import pytest

from tests.gpu.launch import needs_cuda_part, run_ranks


@needs_cuda_part
@pytest.mark.multigpu
@pytest.mark.alone
def test_static_prefills_keep_one_arena() -> None:
    printed = run_ranks(2, "tests.gpu.arena_ranks", timeout_s=480)
    assert printed.count("arenas as expected") == 2
    sys.stdout.write(printed)
