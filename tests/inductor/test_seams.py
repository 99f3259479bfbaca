"""Settings of torch that Inductor changes while it compiles stay in the compile."""

from __future__ import annotations

import threading

import torch
import torch._dynamo
import torch.compiler.config
import torch.fx as fx
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass


class _Patching(CustomGraphPass):
    """Patches a setting, as Inductor does while it traces patterns (torch 2.15)."""

    def __call__(self, graph: fx.Graph) -> None:
        with torch.compiler.config.patch(dynamic_sources="x"):  # type: ignore[attr-defined]
            graph.lint()

    def uuid(self) -> bytes:
        return b"patching"


def _named(x: Tensor) -> Tensor:
    return x + 1 if torch.compiler.config.dynamic_sources == "" else x


def test_a_setting_that_inductor_patched_is_unset_for_other_threads() -> None:
    """`patch` leaves it set in the thread that compiled: a guard on it would fail in every other one."""
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": _Patching(), "fx_graph_cache": False}
    compiled = torch.compile(_named, backend="weave", options=options)  # type: ignore[call-overload]
    before = counters["stats"]["unique_graphs"]
    results: list[Tensor] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(compiled(torch.zeros(3))))
        thread.start()
        thread.join()
    assert [result.tolist() for result in results] == [[1.0] * 3] * 3
    assert counters["stats"]["unique_graphs"] - before == 1
