"""Triton's interpreter as tests use it: it multiplies bf16 matrices, and adapts Triton's language once a launch.

Of itself it multiplies bf16 matrices as the integers of their bits. And it adapts the language again whenever a kernel
calls a function, as `tl.cdiv` is one: hundreds of names that are adapted already, most of what interpreting takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels can be launched while it is entered; Triton has to interpret."""
    from triton.language import core
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    dot, launch, adapt = builder.create_dot, executor.__call__, interpreter._patch_lang
    adapted: set[int] = set()
    """Modules whose functions the current launch has come by, by the identity of their names."""

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != core.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), core.float32)

    def create_dot(self: object, a: object, b: object, *rest: object) -> object:
        return dot(self, widened(a), widened(b), *rest)

    def launch_anew(self: object, *arguments: object, **named: object) -> object:
        adapted.clear()  # a launch restores the language when it ends
        return launch(self, *arguments, **named)

    def adapt_once(fn: object) -> object:
        names = id(fn.__globals__)  # type: ignore[attr-defined]
        if names in adapted:
            return interpreter._LangPatchScope()  # nothing to restore
        adapted.add(names)
        return adapt(fn)

    with (
        mock.patch.object(builder, "create_dot", create_dot),
        mock.patch.object(executor, "__call__", launch_anew),
        mock.patch.object(interpreter, "_patch_lang", adapt_once),
    ):
        yield
