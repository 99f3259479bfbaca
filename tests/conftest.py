"""Setup that all tests share: quiet threads, one compile cache per run, and GPU tests only where they can run."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from zlib import crc32

import pytest

# No test reads or writes the profiles of whoever runs it.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="weaveopt-tests-data-")
atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], True)
# Spawned ranks share the host's cores, and inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests decide by profiles, whose numbers are the same everywhere, but for those of the times themselves.
os.environ.setdefault("WEAVE_TUNE_BUDGET_S", "0")
# Else each process that compiles starts three others, to see whether torch loads for each of the CPU's vector units.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Else Python looks for garbage after every graph that is compiled.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# One Inductor cache for all tests and their ranks: the C++ compiler is most of what they wait for.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"weaveopt-tests-{os.getuid()}"))

# For one of Inductor's kernels, with the headers precompiled, much of g++'s time is the linker's look through
# torch's libraries, at which gold is quicker. g++ takes the linker that it finds in this folder.
if gold := shutil.which("ld.gold"):
    linker = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "linker")
    linker.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (linker / "ld").symlink_to(gold)
    os.environ.setdefault("COMPILER_PATH", str(linker))

# Modules and traced graphs stay, so looking for garbage among them as often as Python does costs a tenth of the time.
gc.set_threshold(100_000, 20, 50)


def pytest_collection_finish() -> None:
    if "torch._dynamo" in sys.modules:  # else nothing here compiles
        from tests.ranks import quick_tracing

        quick_tracing.install()
    # What is loaded by now stays: nobody looks through it again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Garbage is looked for once more, and then no longer: pytest does so several times, and Python at its end.

    Each look goes through all modules, and through what was compiled. What the one look finds pytest reports as before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what is printed the same width wherever tests run."""
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def little_garbage() -> None:
    """Garbage is looked for among what a test makes: to look through all that earlier ones left takes seconds."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same random numbers in every run of a test, and spread tests that need one GPU over all of this host."""
    from tests.ranks.processes import PROCESS

    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(crc32(item.nodeid.encode()))

    if item.get_closest_marker("gpu") is None or (process := os.environ.get(PROCESS)) is None:
        return
    import torch

    if (found := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(int(process) % found)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `multigpu` are skipped, with the reason, where their GPUs are missing.

    With `WEAVE_TEST_SHARED_GPUS=1` one GPU serves any number of ranks.
    """
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item in marked:
        shared = os.environ.get("WEAVE_TEST_SHARED_GPUS") == "1"
        needed = 2 if item.get_closest_marker("multigpu") and not shared else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"CUDA GPUs: needs {needed}, found {found}"))
