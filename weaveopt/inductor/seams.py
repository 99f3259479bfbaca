"""The seams of Inductor that weaveopt uses, and what has to be done around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from enum import Enum, auto

import torch
import torch.compiler.config
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options, list_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from weaveopt.config import Config
from weaveopt.errors import OptionError
from weaveopt.inductor.one_row_gemm import store_rows
from weaveopt.inductor.order import keeping
from weaveopt.inductor.prepared_inputs import Note, prepared, requests_in
from weaveopt.records.inductor_hooks import InductorHook, ReuseHook, ReusePredicate
from weaveopt.records.order import ANY_ORDER, Order

Compiled = Callable[..., object]
_log = logging.getLogger("weaveopt")


class GraphPass(Enum):
    """Pass of a model that a graph computes: without gradients, or one of the two of a training step."""

    INFERENCE = auto()
    FORWARD = auto()
    BACKWARD = auto()

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> GraphPass:
        """The pass that Inductor's arguments of `inner_compile` name."""
        if arguments.get("is_backward"):
            return cls.BACKWARD
        return cls.INFERENCE if arguments.get("is_inference") else cls.FORWARD


def known_options() -> tuple[str, ...]:
    """Names that Inductor takes in `torch.compile(options=...)`."""
    # torch 2.15 also takes names that stand for a setting elsewhere (`force_disable_caches`), which are not listed.
    return tuple(dict.fromkeys((*list_options(), *inductor_config._config)))  # type: ignore[attr-defined]


def patches_for(mode: str | None, config: Config) -> dict[str, object]:
    """Inductor's configuration for a mode and the options passed on to it.

    Inductor pads a GEMM whose sizes are not multiples of 8 if that was faster when it tried, on each rank separately:
    before this backend sees the graph, so ranks would see different ones. It is off unless asked for. Raises
    `OptionError` for a mode that Inductor does not have.
    """
    try:
        mode_patches = list_mode_options(mode) if mode else {}
    except RuntimeError as error:
        raise OptionError(f"unknown mode {mode!r} for backend 'weave': {error}") from None
    patches: dict[str, object] = {"shape_padding": False, **mode_patches, **dict(config.inductor)}
    if config.cuda_graphs:
        patches["triton.cudagraphs"] = True
    return patches


def compile_with(
    inner_compile: Compiled,
    graph_module: fx.GraphModule,
    example_inputs: Sequence[object],
    patches: Mapping[str, object] | None = None,
) -> Compiled:
    """Run AOTAutograd and Inductor around `inner_compile`, which sees every graph on every compile.

    AOTAutograd's cache would skip it on a warm run, so it is off; Inductor's own cache is consulted afterwards.
    """
    with functorch_config.patch(enable_autograd_cache=False), _compiler_settings_kept():
        compiled = compile_fx(
            graph_module,
            example_inputs,  # type: ignore[arg-type]
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=dict(patches) if patches else None,
        )
    assert callable(compiled), f"Inductor returned a {type(compiled).__name__}"
    return compiled


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[object], arguments: Mapping[str, object],
    hooks: Sequence[InductorHook] = (), note: Note = _log.warning, order: Order = ANY_ORDER,
) -> object:  # fmt: skip
    """Inductor's compile of one graph; `hooks` say which results of operators it must leave alone, and which inputs are
    prepared before the first call. `note` gets why some could not be.

    `order` is what `place` returned for the graph. Raises `OrderError` where the code that Inductor wrote has another
    one: the caller then compiles the captured graph on all ranks.
    """
    _forget_mesh_hashes(inputs)
    if inductor_config.coordinate_descent_tuning and store_rows(module.graph):
        module.recompile()
    for hook in hooks:
        if isinstance(hook, ReuseHook):
            _keep_from_reuse(hook.op, hook.keeps)
    requests = requests_in(module.graph, hooks)
    tracing = TracingContext.try_get()
    if tracing is not None and tracing.output_strides:
        tracing.output_strides.clear()  # a compile of the same graph that is not used left them
    with keeping(order) if order else nullcontext(), _compiler_settings_kept():
        return prepared(compile_fx_inner(module, inputs, **arguments), requests, note)  # type: ignore[arg-type]


def compile_alone(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], hooks: Sequence[InductorHook] = (),
    order: Order = ANY_ORDER,
) -> Callable[[list[torch.Tensor]], object]:  # fmt: skip
    """Compile a graph with Inductor that is called by itself with tensors of the sizes of `inputs`.

    The result takes them as one list. It makes no CUDA graph, whatever the options say: code that times it captures
    many calls in one. The compile is isolated from the one that it may be called from, and leaves no trace in it.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each, static_shapes=True) for each in inputs]
    with tracing(TracingContext(mode)), V.set_fake_mode(mode):
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*fakes)
        arguments = {"cudagraphs": BoxedBool(False), "is_inference": True}
        compiled = compile_graph(module, fakes, arguments, hooks, order=order)
    assert callable(compiled), f"Inductor returned a {type(compiled).__name__}"
    return compiled


@contextmanager
def _compiler_settings_kept() -> Iterator[None]:
    """Leave each setting of `torch.compiler.config` as it was, also one that nobody has set.

    Inductor patches one while it traces its patterns (torch 2.15), and `patch` sets it to its default afterwards, in
    this thread alone. Code of torch that Dynamo traces reads it (`DeviceMesh.get_group`), so it is under a guard: every
    other thread would compile again, up to the recompile limit.
    """
    settings = [getattr(each, "user_override", None) for each in torch.compiler.config._config.values()]  # type: ignore[attr-defined]
    kept = [(each, each.set(each.get())) for each in settings if isinstance(each, ContextVar)]
    try:
        yield
    finally:
        for setting, token in kept:
            setting.reset(token)


def _forget_mesh_hashes(inputs: Sequence[object]) -> None:
    """Make the key of Inductor's graph cache the same in every process.

    A graph with DTensor parameters takes its DeviceMesh as an input. The mesh keeps its Python hash, which
    differs between processes and is pickled into the key (torch 2.13), so such graphs would never hit. The hash
    is made again, with the same value, when it is next asked for.
    """
    for value in inputs:
        mesh = object.__getattribute__(value, "real_obj") if type(value) is FakeScriptObject else value
        if type(mesh) is DeviceMesh and getattr(mesh, "_hash", None) is not None:
            mesh._hash = None


_kept_from_reuse: set[object] = set()


def _keep_from_reuse(op: torch._ops.OpOverload, keeps: ReusePredicate) -> None:
    """Prevent Inductor from reusing the memory of these results of an operator.

    It takes every result of a call for memory that it may use again once the last reader is through (torch 2.13).
    """
    if op in _kept_from_reuse:
        return
    _kept_from_reuse.add(op)
    from torch._inductor.lowering import lowerings, make_fallback

    make_fallback(op)
    call_op = lowerings[op]

    def lower(*args: object) -> object:
        results = call_op(*args)
        for index in keeps(args):
            V.graph.never_reuse_buffers.add(results[index].get_name())
        return results

    lowerings[op] = lower


def raising(error: Exception) -> Compiled:
    """A compiled function whose first call raises `error`: Dynamo wraps what a backend raises itself."""

    def raise_error(*_: object) -> object:
        raise error

    return raise_error
