"""What every test shares: quiet threads, one compile cache per run, and GPU tests only where they can run."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest

# Spawned ranks share the host's cores, and inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Else each process that compiles starts three others, to see whether torch loads for each of the CPU's vector units.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# One Inductor cache for all tests and their ranks: the C++ compiler is most of what they wait for.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"weaveopt-tests-{os.getuid()}"))

# Modules and traced graphs stay, so looking for garbage among them as often as Python does costs a tenth of the time.
gc.set_threshold(100_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `multigpu` are skipped, with the reason, where their GPUs are missing."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu")]
    if not marked:
        return
    import torch

    found = torch.cuda.device_count()
    for item in marked:
        needed = 2 if item.get_closest_marker("multigpu") else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), found {found}"))
