"""Kernels of Triton on GPUs with less shared memory than Hopper: plans fit, by what the compiler takes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.graphs.paged_cases import PagedCase, make
from weaveopt.kernel_memory import HOPPER_BYTES, shared_bytes
from weaveopt.ops.attention import gpu, paged_gpu
from weaveopt.ops.attention.plan import LEAST_KEYS, fitting
from weaveopt.ops.attention.reference import reference
from weaveopt.ops.attention.shapes import AttentionOperands, Scores


def test_what_triton_takes_is_there() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.emulation.small_gpus"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = [line["kernel"] for line in found]
    assert kernels.count("paged_attention") == 5 and kernels.count("attention") == 12
    assert kernels.count("gate_up") == kernels.count("down") == 4
    assert [line for line in found if line["shared_bytes"] > line["most_bytes"]] == []


@pytest.mark.parametrize("most_bytes", [64 * 1024, 99 * 1024, 163 * 1024])
def test_fewer_stages_come_before_fewer_keys(most_bytes: int) -> None:
    changed = 0
    for rows, keys, stages, size in itertools.product((16, 64, 128), (32, 64, 128), (2, 3, 4), (64, 128, 256)):
        found = fitting(rows, keys, stages, (size, size), most_bytes)
        if found is None:
            assert 2 * (2 * LEAST_KEYS * size + rows * (size + LEAST_KEYS)) > most_bytes
            continue
        assert 2 * ((found[1] - 1) * found[0] * 2 * size + rows * (size + found[0])) <= most_bytes
        assert found[0] == keys or found[1] == 2
        changed += found != (keys, stages)
        assert fitting(rows, keys, stages, (size, size), HOPPER_BYTES) == (keys, stages)
    assert changed > 0
    assert shared_bytes(torch.device("cpu")) == HOPPER_BYTES


def test_what_fits_nowhere_runs_as_the_plain_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, paged_gpu):
        monkeypatch.setattr(module, "shared_bytes", lambda _: 16 * 1024)
        monkeypatch.setattr(module, "num_sms", lambda _: 40)
        monkeypatch.setattr(module, "has_triton", lambda: True)
    query = torch.randn(1, 4, 300, 256, dtype=torch.float16)
    operands = AttentionOperands(query, query, query)
    assert torch.equal(gpu.masked_attention(operands, Scores(0.1)), reference(operands, Scores(0.1)))
    paged = make(PagedCase(((70, 70),), 4, 4, 256), torch.float16, 0)
    paged.rows.write()
    want = paged_gpu.paged_reference.dense(paged, Scores(0.1))
    assert torch.equal(paged_gpu.attend(paged, Scores(0.1)), want)
