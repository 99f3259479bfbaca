"""The source of the hosts' exchange of token counts, among threads, as it is and with mistakes in it."""

from __future__ import annotations

import ctypes

import pytest

from tests.emulation import emulated_build
from tests.emulation.emulated_build import CSRC, EMULATED, Mistake, making, without

COUNTS = "experts/sharded/counts.cpp"
SOURCES = (EMULATED / "token_counts.cpp", *(
    CSRC / each for each in (COUNTS, "fabric/shm.cpp", "base/memory.cpp", "base/process.cpp")
))  # fmt: skip
MISTAKES = {
    "the count is not sent": without(COUNTS, "count(group_.rank(), group_.epoch() + 1) = tokens;"),
    "no wait for the others": without(COUNTS, "status = group_.wait_all_ready(tag_, timeout_s_);"),
    "one place for all epochs": Mistake(COUNTS, "[epoch % kNumParities]", "[epoch % (WRONG ? 1 : kNumParities)]"),
    "the place of the call before": Mistake(
        COUNTS,
        "most = std::max(most, count(rank, group_.epoch()))",
        "most = std::max(most, count(rank, group_.epoch() - WRONG))",
    ),
    "the last rank is not read": Mistake(
        COUNTS, "rank < group_.world(); ++rank", "rank + WRONG < group_.world(); ++rank"
    ),
}


def num_wrong(world: int, num_calls: int, mistake: str = "") -> int:
    """Number of wrong results over all ranks."""
    library = emulated_build.library(SOURCES, (), MISTAKES, ("-O1", "-pthread"))
    library.run.restype = ctypes.c_int64
    library.run.argtypes = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_double)
    with making(mistake, MISTAKES, library):
        return int(library.run(world, num_calls, 3, 20.0))


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_threads_learn_the_largest(world: int) -> None:
    assert num_wrong(world, 2000) == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    """Each of these lines is needed: the tests fail without it."""
    assert num_wrong(5, 4000, mistake) > 0, mistake
