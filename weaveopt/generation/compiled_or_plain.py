"""A function as it was compiled, or as it is once compiling it has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

from weaveopt.config import Config
from weaveopt.generation import ranks
from weaveopt.generation.compiling import Backend

P = ParamSpec("P")
T = TypeVar("T")


class CompiledOrPlain(Generic[P, T]):
    """`function`, compiled with `backend` where there is one; uncompiled from the first compile error on.

    `changed`: what the function reads and then writes. What graphs before the one that failed have written there is
    undone before the function runs again. `group`: the name of the process group whose ranks run it together; empty:
    none.

    A call raises `AgreementError` where ranks of the group could compile what this one could not, and the compile error
    itself under `strict` and inside of a capture.
    """

    def __init__(
        self, what: str, function: Callable[P, T], backend: Backend | None, changed: tuple[Tensor, ...],
        group: str, config: Config,
    ) -> None:  # fmt: skip
        self.failure = ""
        """Why the function is not compiled though it was to be."""
        self._what, self._function, self._changed = what, function, changed
        self._group, self._config = group, config
        self._compiled = None if backend is None else backend.compile(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._compiled is None:
            return self._function(*args, **kwargs)
        on_gpu = any(each.is_cuda for each in self._changed)
        capturing = on_gpu and torch.cuda.is_current_stream_capturing()
        before = [] if capturing else [each.clone() for each in self._changed]
        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if self._config.strict or capturing:
                raise
            failure = one_line(error)
            ranks.agree_on_failure(self._group, self._what, failure, self._config.compile_timeout_s)
        self.failure, self._compiled = failure, None
        for each, value in zip(self._changed, before, strict=True):
            each.copy_(value)
        return self._function(*args, **kwargs)


def one_line(error: Exception) -> str:
    """The type and the first line of `error`, and of what the compiler itself raised."""
    kind = type(error).__name__
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
        kind += f": {type(error).__name__}"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{kind}: {line}"
