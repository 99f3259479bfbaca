"""`WEAVE_DEBUG=1|2|3`: what weaveopt does while it does it, on standard error, through the logger `weaveopt`.

| value | shown |
|---|---|
| 1 | each graph's decisions as a table, and why each candidate was not taken |
| 2 | also each step's time, and the graph before the first step and after every step that changed it |
| 3 | also each call of one of weaveopt's operators: shapes, dtypes and what was encoded for the kernel |

`TORCH_LOGS="+weaveopt"` is 1 with torch's own handler.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx as fx
from torch.utils._python_dispatch import TorchDispatchMode

from weaveopt.config import variable
from weaveopt.errors import WeaveError
from weaveopt.reporting.events import LOGGER

VARIABLE = "WEAVE_DEBUG"
STEPS, CALLS = 8, 6
"""Levels below `logging.DEBUG`, at which steps and calls are logged."""
LEVELS = (logging.NOTSET, logging.DEBUG, STEPS, CALLS)
"""Logging levels by the variable's value."""


def listen() -> None:
    """Logs to standard error what `WEAVE_DEBUG` asks for. Raises `WeaveError` for a value that it has not."""
    asked = variable(VARIABLE) or "0"
    if asked not in map(str, range(len(LEVELS))):
        raise WeaveError(f"{VARIABLE}={asked}: expected 0, 1, 2 or 3")
    if asked == "0" or any(isinstance(each, _RankHandler) for each in LOGGER.handlers):
        return
    LOGGER.addHandler(_RankHandler(sys.stderr))
    LOGGER.setLevel(LEVELS[int(asked)])
    LOGGER.propagate = False  # else a handler of the root prints every line again


class _RankHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Each line with the rank that it is of."""

    def format(self, record: logging.LogRecord) -> str:
        rank = variable("RANK")
        return f"[weaveopt{f' rank {rank}' if rank else ''}] {super().format(record)}"


def log_step(step: str, lap_us: float, graphs: Sequence[fx.Graph]) -> None:
    """Log a step, its time, and those of `graphs` that it changed or made: all variants, the captured graph first."""
    if not LOGGER.isEnabledFor(STEPS):
        return
    LOGGER.log(STEPS, "step %s: %.1f us", step, lap_us)
    for index, graph in enumerate(graphs):
        text = str(graph)
        if _texts.get(graph) != text:
            LOGGER.log(STEPS, "graph %d after step %s\n%s", index, step, text)
        _texts[graph] = text


_texts: weakref.WeakKeyDictionary[fx.Graph, str] = weakref.WeakKeyDictionary()
"""Texts of graphs as last logged. Only filled at level 2 and 3."""


def watched(compiled: Callable[..., object]) -> Callable[..., object]:
    """Wrap `compiled` so that each call logs the operators of weaveopt that it runs; unchanged if the log is off."""
    if not LOGGER.isEnabledFor(CALLS):
        return compiled

    @functools.wraps(compiled)
    def run(*arguments: object) -> object:
        with _Calls():
            return compiled(*arguments)

    return run


class _Calls(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        given = kwargs or {}
        if func.namespace == "weave":
            named = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in given.items())]
            LOGGER.log(CALLS, "%s(%s)", func, ", ".join(named))
        return func(*args, **given)


def _text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
