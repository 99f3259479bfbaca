"""Modules that the server of forked ranks loads: once for all tests, before it has any thread.

Each rank that loaded and compiled these by itself would spend more on that than on most tests.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
from collections.abc import Sequence

import pytest  # noqa: F401  (every test file)
import torch
import torch._inductor.compile_fx as inductor
import tqdm
import transformers.generation.utils
import transformers.modeling_utils
import transformers.models.llama.modeling_llama  # noqa: F401
from functorch.compile import make_boxed_func
from torch import nn

import tests.ranks.state  # noqa: F401
from tests.ranks import quick_tracing

SCALAR = 1
"""Inductor's word for no vectors: no CPU has one bit of them."""


class _Block(nn.Module):
    """A few layers of the kind that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.silu(self.linear(x)) + x)  # type: ignore[no-any-return]


def _captured(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> object:
    def run_as_it_is(module: torch.fx.GraphModule, _: object, **__: object) -> object:
        return make_boxed_func(module.forward)

    return inductor.compile_fx(graph, inputs, inner_compile=run_as_it_is)


def load_all() -> None:
    """All of weaveopt's modules: warm ranks restore what these had before the first test."""
    for name in ("weaveopt", "weaveopt.rewrites", "weaveopt.cost_model"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def warm_up() -> None:
    """Compiles once what the first graph of a process has torch load and trace: seconds of every rank that compiles.

    No gradients: to trace them, a torch that is built for accelerators starts threads.
    """
    quick_tracing.install()
    tqdm.tqdm.monitor_interval = 0  # else it starts a thread
    # Of one of Inductor's kernels g++ takes twice as long where it has vectors: their header is most of what it reads.
    # Examples, which are launched, are compiled as users' models are.
    torch._inductor.config.cpp.simdlen = SCALAR
    torch.set_num_threads(1)
    for dynamic in (False, True):
        # More than one compile thread is a thread here. What AOTAutograd's cache has, it does not trace.
        with (
            torch.no_grad(),
            torch._inductor.config.patch(compile_threads=1),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            for backend in (_captured, "inductor"):
                torch.compile(_Block(), backend=backend, dynamic=dynamic)(torch.ones(4, 8))
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"a process that forks ranks must have one thread, found {len(tasks)}"


load_all()
warm_up()
gc.collect()
# Ranks never look through what they share with the server, so its pages stay shared.
gc.freeze()
gc.set_threshold(100_000, 20, 50)
