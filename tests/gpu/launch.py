"""How tests start ranks on GPUs, and when they cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weaveopt.fabrics.traits import NativePart, is_built

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    # Multicast objects can put the GPUs of a shared host out of service; nothing here uses them.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_NUM_THREADS": "1",
}

needs_cuda_part = pytest.mark.skipif(not is_built(NativePart.CUDA), reason="weaveopt was built without CUDA")
