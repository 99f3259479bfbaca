"""The text by which hosts tell each other token counts, among threads, as it is and with faults put into it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.emulated_build import CSRC, EMULATED, compile_with

COUNTS = CSRC / "moe_sharded" / "counts.cpp"
FLAGS = ("-O1", "-pthread")
AROUND = ("fabric/shm.cpp", "base/memory.cpp", "base/process.cpp")
FAULTS = {
    "the count is not sent": ("        count(group_.rank(), group_.epoch() + 1) = tokens;\n", ""),
    "no wait for the others": ("status = group_.wait_all_ready(tag_, timeout_s_);", "(void)timeout_s_;"),
    "one place for all epochs": ("[epoch % kNumParities]", "[epoch % 1]"),
    "the place of the call before": (
        "most = std::max(most, count(rank, group_.epoch()))",
        "most = std::max(most, count(rank, group_.epoch() - 1))",
    ),
    "the last rank is not read": ("rank < group_.world(); ++rank", "rank + 1 < group_.world(); ++rank"),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of all but the counts."""
    folder = tmp_path_factory.mktemp("objects")
    sources = [EMULATED / "token_counts.cpp", *(CSRC / each for each in AROUND)]
    made = [str(folder / f"{each.stem}.o") for each in sources]
    for source, to in zip(sources, made, strict=True):
        compile_with(*FLAGS, "-c", f"-I{CSRC}", str(source), "-o", to)
    return made


def num_wrong(counts: Path, objects: list[str], folder: Path, world: int, num_calls: int) -> int:
    """Of all ranks' results."""
    built = folder / "token_counts.so"
    compile_with(*FLAGS, "-shared", f"-I{CSRC}", str(counts), *objects, "-o", str(built))
    library = ctypes.CDLL(str(built))
    library.run.restype = ctypes.c_int64
    library.run.argtypes = (ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_double)
    return int(library.run(world, num_calls, 3, 20.0))


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_threads_learn_the_largest(world: int, objects: list[str], tmp_path: Path) -> None:
    assert num_wrong(COUNTS, objects, tmp_path, world, 2000) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_show(fault: str, objects: list[str], tmp_path: Path) -> None:
    """What these tests are for: each of these lines is needed."""
    text, (right, wrong) = COUNTS.read_text(), FAULTS[fault]
    assert text.count(right) == 1, f"{fault}: {text.count(right)} places"
    changed = tmp_path / COUNTS.name
    changed.write_text(text.replace(right, wrong))
    assert num_wrong(changed, objects, tmp_path, 5, 4000) > 0, fault
