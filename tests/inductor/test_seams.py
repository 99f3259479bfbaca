"""Settings of torch that Inductor changes while it compiles stay in the compile."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch
import torch._dynamo
import torch.compiler.config
import torch.fx as fx
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.house.source import ROOT


class _Patching(CustomGraphPass):
    """Patches a setting, as Inductor does while it traces patterns (torch 2.15)."""

    def __call__(self, graph: fx.Graph) -> None:
        with torch.compiler.config.patch(dynamic_sources="x"):  # type: ignore[attr-defined]
            graph.lint()

    def uuid(self) -> bytes:
        return b"patching"


def _named(x: Tensor) -> Tensor:
    return x + 1 if torch.compiler.config.dynamic_sources == "" else x


def compile_in_threads() -> None:
    """Prints what three threads computed, and how many graphs they compiled."""
    options = {"post_grad_custom_pre_pass": _Patching(), "fx_graph_cache": False}
    compiled = torch.compile(_named, backend="weave", options=options)  # type: ignore[call-overload]
    results: list[Tensor] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(compiled(torch.zeros(3))))
        thread.start()
        thread.join()
    print([result.tolist() for result in results], counters["stats"]["unique_graphs"])


def test_a_setting_that_inductor_patched_is_unset_for_other_threads() -> None:
    """`patch` leaves it set in the thread that compiled: a guard on it would fail in every other one.

    In a process of its own: built for CUDA and without a GPU, torch 2.11 crashes where tensors are fake once another
    thread has compiled, by Inductor too.
    """
    program = "from tests.inductor.test_seams import compile_in_threads; compile_in_threads()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"{[[1.0] * 3] * 3} 1"
