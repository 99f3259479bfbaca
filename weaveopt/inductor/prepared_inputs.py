"""Inputs of a compiled graph, given to the rules that prepare them before a call.

Only in a call are they the model's own tensors: graphs are traced and compiled with stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

import torch
import torch.fx as fx
from torch.fx.node import Argument

from weaveopt.graph.facts import runs_on_gpu
from weaveopt.ops.captured_graphs import may_read_weights, note_capture
from weaveopt.records.inductor_hooks import InductorHook, InputHook
from weaveopt.wording import counted, named

Compiled = Callable[..., object]
Note = Callable[[str], None]
"""Gets why the inputs of a call were not prepared."""
MOST_TIMES = 256
"""Calls of one compiled graph after which its inputs are prepared; more than the layers that it may serve."""


@dataclass(frozen=True)
class PreparedCall:
    """A call whose arguments are inputs of its graph, by their positions among them; other tensors are None."""

    hook: InputHook
    arguments: tuple[object, ...]

    def prepare(self, inputs: Mapping[int, object], are_read: Callable[[], bool]) -> str:
        """Gives the arguments to the hook, from inputs by their positions."""
        try:
            return self.hook.prepare([_filled(each, inputs) for each in self.arguments], are_read)
        except Exception as error:  # the graph runs without it
            return named(error)


@dataclass(frozen=True)
class InputRequests:
    """Requests of a graph's operators for its inputs."""

    calls: tuple[PreparedCall, ...]
    hooks: tuple[InputHook, ...]
    """Those of all rules."""
    on_gpu: bool
    """True if CUDA graphs may capture the graph."""


def requests_in(graph: fx.Graph, hooks: Sequence[InductorHook]) -> InputRequests:
    """The calls of operators that have an `InputHook`, in graph order."""
    position = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    every, calls = tuple(hook for hook in hooks if isinstance(hook, InputHook)), []
    for hook in every:
        for node in graph.find_nodes(op="call_function", target=hook.op):
            calls.append(PreparedCall(hook, tuple(_positions(each, position) for each in node.args)))
    return InputRequests(tuple(calls), every, runs_on_gpu(graph))


def prepared(compiled: object, requests: InputRequests, note: Note) -> object:
    """`compiled`, which takes its inputs as one list, with inputs prepared as `requests` say.

    They are before the first call, and after one in which an operator found them unprepared: one compiled graph may
    serve several layers and models, and their parameters may be replaced. A call that a CUDA graph captures prepares
    nothing: memory of its own would be part of the graph. Inputs that are others in each call are left after
    `MOST_TIMES`. `note` gets each reason once.
    """
    calls, on_gpu = requests.calls, requests.on_gpu
    if not calls and not (requests.hooks and on_gpu):
        return compiled
    assert callable(compiled), f"Inductor returned a {type(compiled).__name__}"
    asked = tuple(dict.fromkeys(call.hook for call in calls))
    positions = tuple(dict.fromkeys(at for call in calls for each in call.arguments for at in _positions_in(each)))
    take = itemgetter(*positions) if len(positions) > 1 else lambda inputs: tuple(inputs[at] for at in positions)
    noted: set[str] = set()
    times = 0

    def prepare(inputs: Sequence[object]) -> None:
        nonlocal times
        times += 1
        if times > MOST_TIMES:
            reasons = {f"the inputs were others in {counted(MOST_TIMES, 'call')}"} if times == MOST_TIMES + 1 else set()
        else:
            by_position = dict(zip(positions, inputs, strict=True))
            are_read = cache(may_read_weights)
            reasons = {why for call in calls if (why := call.prepare(by_position, are_read))}
            if on_gpu:
                torch.cuda.empty_cache()  # memory that inputs no longer occupy is of no size that others ask for
        for why in sorted(reasons - noted):
            note(why)
        noted.update(reasons)

    def run(inputs: list[object]) -> object:
        if on_gpu and _is_captured():
            note_capture()
            return compiled(inputs)
        if not calls:
            return compiled(inputs)
        taken = take(inputs)  # the callee empties the list
        if not times:
            prepare(taken)
        before = [hook.num_unprepared() for hook in asked]
        result = compiled(inputs)
        if before != [hook.num_unprepared() for hook in asked]:
            prepare(taken)
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _is_captured() -> bool:
    return torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class _Position:
    """Position of an input among those of its graph."""

    index: int


def _positions(argument: Argument, position: dict[fx.Node, int]) -> object:
    if isinstance(argument, fx.Node):
        return _Position(position[argument]) if argument in position else None
    if isinstance(argument, list | tuple):
        return [_positions(each, position) for each in argument]
    return argument


def _positions_in(argument: object) -> Iterator[int]:
    if isinstance(argument, _Position):
        yield argument.index
    elif isinstance(argument, list):
        for each in argument:
            yield from _positions_in(each)


def _filled(argument: object, inputs: Mapping[int, object]) -> object:
    if isinstance(argument, _Position):
        return inputs[argument.index]
    return [_filled(each, inputs) for each in argument] if isinstance(argument, list) else argument
