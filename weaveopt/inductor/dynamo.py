"""Dynamo's state of a compile and of calls that it left uncompiled: frames, recompile limits, stances.

All of it is private to torch: each look at it gives nothing if this torch version stores it differently.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType

import torch
from torch._C._dynamo import eval_frame as native
from torch._dynamo import decorators, eval_frame, symbolic_convert
from torch._dynamo.types import DynamoCallback
from torch._dynamo.utils import get_compilation_metrics, get_metrics_context
from torch._guards import CompileContext
from torch._logging import _internal

from weaveopt.inductor.breaks import short
from weaveopt.records.report import Uncompiled

_log = logging.getLogger("weaveopt")
BACKEND = "weave"
"""Name under which this backend is registered with torch."""
_LIMIT_REACHED = "recompile limit exceeded"
_LONGEST_GUARD = 300
"""Characters of a guard in a message."""
_STANCES = {
    "force_eager": "every call under it runs uncompiled",
    "eager_on_recompile": "calls under it run uncompiled where no earlier compile serves them",
    "eager_then_compile": "the first call of each function under it runs uncompiled",
}


@dataclass(frozen=True)
class CompiledFrame:
    """A function as Dynamo compiles it. A torch._dynamo.reset() drops what was made of it."""

    code: weakref.ref[CodeType]
    compile_id: str
    """`3/1`: the number of the function, and of its compile. Both begin anew after a reset."""
    translator: weakref.ref[symbolic_convert.InstructionTranslator]
    """Lives as long as this compile."""
    began_us: int
    """Start time, on the clock of torch's own compile records."""

    @property
    def number(self) -> str:
        return self.compile_id.rpartition("/")[0]

    @property
    def name(self) -> str:
        code = self.code()
        return "" if code is None else f"{code.co_qualname} ({short(code.co_filename)}:{code.co_firstlineno})"

    def is_of(self, code: CodeType) -> bool:
        """True for the function itself, and for what Dynamo made of it after a graph break."""
        own = self.code()
        if own is None or own.co_filename != code.co_filename:
            return False
        return own is code or own.co_name.startswith(f"torch_dynamo_resume_in_{code.co_name}_at_")


@dataclass(frozen=True)
class Compile:
    """One compile of a frame. Graphs of its forward and backward pass have the same."""

    frame: int
    """-1 where Dynamo does not compile (a graph that is compiled by itself)."""
    attempt: int
    """0: the first compile of the frame."""
    guard: str
    """Why Dynamo compiled the frame again, in its words; empty where it says nothing."""


def current_compile() -> Compile:
    """The compile that is in progress."""
    found = CompileContext.current_compile_id()
    frame = None if found is None else found.frame_id
    if found is None or frame is None:
        return Compile(-1, 0, "")
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    guard = str(reason or "").strip('"').partition("User stack trace")[0]
    return Compile(frame, found.frame_compile_id or 0, " ".join(guard.split())[:_LONGEST_GUARD])


def current_frame() -> CompiledFrame | None:
    """The function that this thread's Dynamo compiles now; None outside of a compile of it."""
    translator, compile_id = _translator(), CompileContext.current_compile_id()
    if translator is None or compile_id is None:
        return None
    return CompiledFrame(
        weakref.ref(translator.f_code), str(compile_id), weakref.ref(translator), time.time_ns() // 1000
    )


def current_modules() -> tuple[tuple[torch.nn.Module, ...], tuple[torch.nn.Module, ...]]:
    """Modules among the variables of that function, and among the globals that it names."""
    translator = _translator()
    if translator is None:
        return (), ()
    named = (translator.f_globals.get(name) for name in translator.f_code.co_names)
    return _modules(translator.f_locals.values()), _modules(named)


def _modules(values: Iterable[object]) -> tuple[torch.nn.Module, ...]:
    return tuple(value for value in values if isinstance(value, torch.nn.Module))


def _translator() -> symbolic_convert.InstructionTranslator | None:
    return getattr(symbolic_convert.tls, "current_tx", None)


def is_kept(frame: CompiledFrame) -> bool:
    """True if Dynamo still has what it compiled of the frame then: no reset, and no guarded object that was freed."""
    code = frame.code()
    if code is None:
        return False
    entries = native._debug_get_cache_entry_list(code)
    count = getattr(native, "_get_total_cache_entry_count", None)
    if count is not None and count(code) > len(entries):  # `isolate_recompiles` keeps those of each wrapper separate
        return True
    return any(str(getattr(entry, "compile_id", frame.compile_id)) == frame.compile_id for entry in entries)


def limits_reached(frames: Iterable[CompiledFrame]) -> Iterator[Uncompiled]:
    """The functions of these frames that Dynamo compiles no more, each once, and why."""
    found = {frame.number: frame for frame in frames}
    for metrics in get_compilation_metrics():
        reason = str(getattr(metrics, "fail_reason", None) or "")
        number = str(getattr(metrics, "compile_id", None) or "").rpartition("/")[0]
        began_us = getattr(metrics, "start_time_us", None) or 0
        if _LIMIT_REACHED not in reason.lower() or number not in found or began_us < found[number].began_us:
            continue
        limit = "accumulated_recompile_limit" if "accumulated_recompile_limit" in reason else "recompile_limit"
        last = " ".join(str(getattr(metrics, "recompile_reason", None) or "not reported").split())
        yield Uncompiled(
            what=found.pop(number).name,
            reason=f"Dynamo's {limit} was reached: calls that none of its compiles serves run uncompiled; last: {last}",
            hint=f"mark what varies as dynamic (torch._dynamo.mark_dynamic), or raise torch._dynamo.config.{limit}",
        )


_modules_called: weakref.WeakKeyDictionary[torch.nn.Module, Counter[str]] = weakref.WeakKeyDictionary()
_functions_called: weakref.WeakKeyDictionary[Callable[..., object], Counter[str]] = weakref.WeakKeyDictionary()
_uncounted = False


def under_stances(
    modules: Sequence[torch.nn.Module] | None, function: Callable[..., object] | None = None
) -> Iterator[Uncompiled]:
    """Calls of these modules, or of a function, that a stance kept from compiling; without either, all such calls."""
    if modules is not None:
        found = [_modules_called[module] for module in modules if module in _modules_called]
    elif function is not None:
        found = [_functions_called.get(function, Counter())]
    else:
        found = [*_modules_called.values(), *_functions_called.values()]
    for stance, calls in sum(found, Counter[str]()).items():
        reason = f"torch.compiler.set_stance({stance!r}): {_STANCES[stance]}"
        yield Uncompiled("", reason, "call outside of the stance", calls)


@contextmanager
def forced_eager() -> Iterator[None]:
    """Run calls uncompiled on purpose: no report counts them."""
    global _uncounted
    before, _uncounted = _uncounted, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _uncounted = before


def called_modules() -> Iterator[torch.nn.Module]:
    """Modules whose `__call__` is on the stack, from the innermost out."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        # Only of these frames: to read a frame's locals keeps them alive until it ends.
        if frame.f_code.co_name == "_wrapped_call_impl":
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module


def compiles_with_weave(module: torch.nn.Module) -> bool:
    """True if calls of the module itself go to this backend: `module.compile`, or what `torch.compile` returned."""
    context = getattr(module, "dynamo_ctx", None)
    if context is not None:
        return _is_ours(getattr(context, "callback", None))
    call = getattr(module, "_compiled_call_impl", None)
    code, cells = getattr(call, "__code__", None), getattr(call, "__closure__", None)
    if code is None or not cells:
        return False
    closed_over = dict(zip(code.co_freevars, cells, strict=True))
    return "callback" in closed_over and _is_ours(closed_over["callback"].cell_contents)


def _is_ours(callback: object) -> bool:
    if not callable(callback):
        return False
    wrapped = eval_frame.innermost_backend(callback)
    backend = getattr(wrapped, "compiler_fn", wrapped)
    return getattr(wrapped, "compiler_name", "") == BACKEND or getattr(backend, "__module__", "") == "weaveopt.backend"


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a JSON file of this name to the current compile's artifacts in torch's structured trace (`tlparse`).

    `payload` is called only where somebody traces (`TORCH_TRACE`).
    """
    trace_structured = getattr(_internal, "trace_structured", None)
    if trace_structured is None:
        return
    try:
        metadata = {"name": name, "encoding": "json"}
        trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=payload, expect_trace_id=False)
    except TypeError:  # a torch whose signature is another one
        _log.debug("no artifact in torch's structured trace", exc_info=True)


def watch_stances() -> None:
    """Count calls under a stance that keeps them from compiling. Under torch's default stance nothing is wrapped.

    torch asks `_callback_from_stance` at every call of something compiled; only while such a stance holds the question
    goes through here.
    """
    if not hasattr(eval_frame, "_callback_from_stance") or hasattr(eval_frame._set_stance, "_weave_watches"):
        return
    set_stance, from_stance = eval_frame._set_stance, eval_frame._callback_from_stance

    def counted(callback: DynamoCallback) -> DynamoCallback:
        stance = eval_frame._stance.stance
        if stance in _STANCES and not _uncounted and _is_ours(callback):
            _count(stance, sys._getframe(1).f_locals.get("fn"))
        return from_stance(callback)

    def choose() -> None:
        eval_frame._callback_from_stance = counted if eval_frame._stance.stance in _STANCES else from_stance

    @functools.wraps(set_stance)
    def watched(stance: eval_frame.DynamoStance) -> eval_frame.DynamoStance:
        before = set_stance(stance)
        choose()
        return before

    watched._weave_watches = True  # type: ignore[attr-defined]
    eval_frame._set_stance = decorators._set_stance = watched
    choose()


def _count(stance: str, function: Callable[..., object] | None) -> None:
    module = next(called_modules(), None)
    if module is not None:
        _modules_called.setdefault(getattr(module, "_orig_mod", module), Counter())[stance] += 1
    elif function is not None:
        _functions_called.setdefault(function, Counter())[stance] += 1
