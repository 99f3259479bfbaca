"""Kernels of a graph as Inductor's scheduler lists them: generated kernels with their bytes, and library calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest import mock

import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from weaveopt.cli import preview
from weaveopt.cli.layers import every_layer
from weaveopt.cli.model_source import CaptureRequest, Source


@dataclass(frozen=True)
class Generated:
    """Kernels of one graph as Inductor schedules them."""

    num_loops: int
    loops_bytes: int
    """Read and written by generated kernels, but for those that only count calls (Inductor takes their whole cache)."""
    calls: tuple[str, ...]
    """Names of the library kernels."""

    @property
    def num_products(self) -> int:
        return sum(name.endswith(("mm", "addmm")) for name in self.calls)

    @property
    def num_attentions(self) -> int:
        return sum("scaled_dot_product" in name for name in self.calls)


class _Stop(Exception):
    pass


def generated(module: fx.GraphModule, inputs: Sequence[object], arguments: Mapping[str, object]) -> Generated:
    """Inductor's lowering and scheduling of a graph, of which no code is generated."""
    found: list[Generated] = []

    def count(lowering: GraphLowering) -> None:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        num_loops = loops_bytes = 0
        calls: list[str] = []
        for node in lowering.scheduler.nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                calls.append(str(getattr(node.node, "python_kernel_name", "") or "").removesuffix(".default"))
            elif not isinstance(node, NopKernelSchedulerNode):
                num_loops += 1
                names = {origin.name for each in node.get_nodes() for origin in each.node.get_origins()}
                counts_calls = any(name.startswith("copy_") for name in names)
                loops_bytes += 0 if counts_calls else node.get_read_write_buffers_sizes()
        found.append(Generated(num_loops, loops_bytes, tuple(calls)))
        raise _Stop

    with mock.patch.object(GraphLowering, "compile_to_module", count), inductor_config.patch(force_disable_caches=True):
        try:
            compile_fx_inner(module, inputs, **arguments)  # type: ignore[arg-type]
        except Exception as error:
            if not found:
                raise
            assert "_Stop" in repr(error) or isinstance(error.__cause__, _Stop), error
    assert len(found) == 1
    return found[0]


def captured(
    config: object, request: CaptureRequest, seen: Callable[[fx.GraphModule, Sequence[object], dict[str, object]], None]
) -> None:
    """Passes the graph of one rank of a model, as `inner_compile` gets it, to `seen`."""

    def inner_compile(module: fx.GraphModule, inputs: Sequence[object], **arguments: object) -> object:
        outputs = fx.map_arg(module.graph.output_node().args[0], lambda node: node.meta["val"])
        seen(module, inputs, arguments)

        def returns_fakes(given: list[object]) -> object:
            given.clear()
            return outputs

        returns_fakes._boxed_call = True  # type: ignore[attr-defined]
        return returns_fakes

    def backend(module: fx.GraphModule, inputs: Sequence[object]) -> object:
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(module, inputs, inner_compile=inner_compile)  # type: ignore[arg-type]

    total = config.num_hidden_layers  # type: ignore[attr-defined]
    preview.capture(Source(request.model, config), request, every_layer(total), backend)  # type: ignore[arg-type]
