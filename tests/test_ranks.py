"""The ranks that tests run on."""

from __future__ import annotations

import gc
import sys

from tests.ranks import run_ranks


def _begins_with(_: int) -> tuple[bool, bool]:
    return "torch._inductor.compile_fx" in sys.modules, gc.get_freeze_count() > 0


def test_ranks_begin_with_what_the_server_loaded() -> None:
    """multiprocessing says nothing where it cannot load what it was told to; each rank would then load it all."""
    assert run_ranks(_begins_with, 2) == [(True, True)] * 2
