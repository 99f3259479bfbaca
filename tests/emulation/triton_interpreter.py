"""Support for bf16 in Triton's interpreter, which multiplies bf16 matrices as the integers of their bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

import numpy as np


def with_bf16() -> AbstractContextManager[object]:
    """`tl.dot` of bf16 too, while it is entered; Triton has to interpret."""
    from triton.language import core
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != core.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), core.float32)

    def create_dot(self: object, a: object, b: object, *rest: object) -> object:
        return dot(self, widened(a), widened(b), *rest)

    return mock.patch.object(builder, "create_dot", create_dot)
