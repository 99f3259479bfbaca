"""Compiler backend of a decode step, and functions that Dynamo compiles independently of one another."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar, cast

import torch
from transformers import GenerationConfig

from weaveopt.config import Config, OptionValue, known_options, resolve

P = ParamSpec("P")
T = TypeVar("T")

OWN_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes that have Inductor capture CUDA graphs, and what they are without: the step is captured whole already."""
ONE_ROW = "coordinate_descent_tuning"
"""Inductor option that turns GEMMs of one row into reductions, which read weights faster than a GEMM kernel does,
and tunes them on the device."""
SIDE_BY_SIDE = "combo_kernels"
"""Inductor option that makes one kernel of several independent ones, such as the GEMMs of query, key and value, each
of which alone is too short to read at the memory's speed."""
CAPTURING_OPTIONS = ("cuda_graphs", "triton.cudagraphs")


@dataclass(frozen=True)
class Backend:
    """A compiler backend, by the arguments of `torch.compile`."""

    name: str
    compiler: str | Callable[..., object]
    mode: str | None = None
    options: tuple[tuple[str, object], ...] = ()

    def compile(self, function: Callable[P, T]) -> Callable[P, T]:
        """Compile `function` for the shapes it is called with, graph breaks allowed; its code object is a separate
        copy."""
        options = dict(self.options) or None
        return torch.compile(
            with_own_code(function),
            backend=self.compiler,
            mode=None if options else self.mode,
            options=options,  # type: ignore[arg-type]
            dynamic=False,
        )

    def config(self) -> Config:
        """Parse weaveopt's options of this call. Raises `OptionError` if a value is invalid."""
        own = {name: value for name, value in self.options if name in known_options()}
        return resolve(cast(dict[str, OptionValue], own))

    def for_one_row(self) -> Backend:
        """Choose a backend for steps of one sequence, unless the user has said how to tune.

        Ranks may tune differently: their results then differ in rounding, so nothing that all of them have to compute
        alike, such as a router, may be in the step.
        """
        given = {name for name, _ in self.options}
        if self.name not in ("weave", "inductor") or self.mode or ONE_ROW in given:
            return self
        side_by_side = () if SIDE_BY_SIDE in given else ((SIDE_BY_SIDE, True),)
        return replace(self, options=(*self.options, (ONE_ROW, True), *side_by_side))

    def for_choosing(self) -> Backend:
        """Backend of token selection: Inductor alone if the step's is weave, since nothing there can be rewritten
        and no report should list it."""
        return Backend("inductor", "inductor") if self.name == "weave" else self


def backend_for(model: torch.nn.Module, config: GenerationConfig) -> Backend | None:
    """Select the backend: that of `compile_config`, else that of the compiled model, else weave; None if compiling
    is off."""
    if config.disable_compile:
        return None
    asked = config.compile_config
    if asked is not None:
        return _backend(asked.backend, asked.mode, asked.options)
    wrapper = _compiler_of(model)
    if wrapper is not None:
        arguments = wrapper.kwargs
        return _backend(wrapper.compiler_name, arguments.get("mode"), arguments.get("options"))
    return Backend("weave", "weave")


def _backend(compiler: object, mode: str | None, options: Mapping[str, object] | None) -> Backend:
    assert isinstance(compiler, str) or callable(compiler), compiler
    name = compiler if isinstance(compiler, str) else getattr(compiler, "__name__", str(compiler))
    kept = tuple((key, value) for key, value in (options or {}).items() if key not in CAPTURING_OPTIONS)
    return Backend(name, compiler, OWN_GRAPHS.get(mode, mode) if mode else None, kept)


def _compiler_of(model: torch.nn.Module) -> torch._TorchCompileWrapper | None:
    """Find the arguments of `model.compile(backend=...)`, which torch keeps inside the function that it made."""
    found: object = getattr(model, "_compiled_call_impl", None)
    if found is None:
        return None
    function = found
    if isinstance(found, types.FunctionType):
        cells = zip(found.__code__.co_freevars, found.__closure__ or (), strict=True)
        function = next((cell.cell_contents for name, cell in cells if name == "callback"), None)
    while function is not None:
        if isinstance(function, torch._TorchCompileWrapper):
            return function
        function = getattr(function, "_torchdynamo_orig_backend", None) or getattr(
            function, "_torchdynamo_orig_callable", None
        )
    return None


def with_own_code(function: Callable[P, T]) -> Callable[P, T]:
    """Return a copy of `function` with a separate code object.

    Dynamo keeps what it compiled with the code object and gives up after eight versions of it; steps of different
    shapes are no versions of one another. With its code the compiled step goes away.
    """
    assert isinstance(function, types.FunctionType), function
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
