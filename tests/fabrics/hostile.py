"""Calls every binding of `weaveopt._native` with invalid values: `python -m tests.fabrics.hostile`.

What there is to call, and of which types, is read from the stub. Of a call that is right one argument after the
other is replaced, and then all of them at random. Sizes and counts are any number, addresses those of enough memory, or
none. Prints each call before it is made, so that the last line names the one that ended the process.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parents[2] / "weaveopt"
ARENA_BYTES = 1 << 16
ERRORS = (ValueError, TypeError, RuntimeError, MemoryError, OverflowError)
SMALL = (-1, 0, 1, 2, 3, 7, 17, 4097)
LARGE = (2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (float("nan"), float("inf"), -1.0, 0.0, 1e300)
TEXTS = ("", "\0", "x" * 5000, "a:b:c:d:e", "avx2")
ADDRESSES = frozenset({
    "partial", "residual", "reduced_bias", "post_weight", "post_bias", "weight", "bias", "normalized", "sum", "x",
    "experts", "rows", "results", "weights", "out", "shard", "whole",
})  # fmt: skip
"""Names of arguments that are addresses."""
NUM_RANDOM = 20
"""Calls of each with all arguments at random."""


def load() -> ModuleType:
    """The module by itself: nothing of torch is needed."""
    path = next(PACKAGE.glob("_native.*.so"))
    spec = importlib.util.spec_from_file_location("weaveopt._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Argument:
    name: str
    kind: str
    """As the stub has it."""


@dataclass(frozen=True)
class Callee:
    owner: str
    """A class; empty for functions of the module."""
    name: str
    arguments: tuple[Argument, ...]
    is_static: bool = False


def callees(native: ModuleType) -> list[Callee]:
    """Everything of the stub that this build has; enumerations have nothing to call."""
    found = []
    for node in ast.parse((PACKAGE / "_native.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and hasattr(native, node.name):
            found.append(Callee("", node.name, _arguments(node)))
        if not isinstance(node, ast.ClassDef) or not hasattr(native, node.name):
            continue
        if any(isinstance(base, ast.Name) and base.id == "Enum" for base in node.bases):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and (each.name == "__init__" or not each.name.startswith("__")):
                decorators = {word.id for word in each.decorator_list if isinstance(word, ast.Name)}
                if "property" not in decorators:
                    found.append(Callee(node.name, each.name, _arguments(each), "staticmethod" in decorators))
    return found


def _arguments(node: ast.FunctionDef) -> tuple[Argument, ...]:
    given = [*node.args.posonlyargs, *node.args.args]
    return tuple(
        Argument(each.arg, ast.unparse(each.annotation) if each.annotation else "")
        for each in given
        if each.arg != "self"
    )


HAS_GPU = Path("/dev/nvidia0").exists()


class World:
    """Objects and arguments that are right: a group of one rank, with sites that fit its arena."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.memory = ctypes.create_string_buffer(1 << 22)
        self.address = (ctypes.addressof(self.memory) + 63) // 64 * 64
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nothing is left of an earlier call."""
        self.segment = self.native.Segment.create(ARENA_BYTES, 1, 0)
        self.group = self.native.Group([self.segment], 0, 1, 0)

    def layout(self) -> object:
        found = self.native.Layout()
        found.partial_offset, found.partial_bytes, found.output_offset = 0, 4096, 8192
        return found

    def site(self, kind: str) -> object:
        """A record of constants that fit the arena."""
        found = getattr(self.native, kind)()
        values: Mapping[str, object] = {
            "RowsSite": {"partial_offset": 0, "partial_bytes": 4096},
            "AllReduceNormSite": {"hidden": 16, "max_tokens": 8, "layout": self.layout()},
            "ShardedMixtureSite": {
                "dispatch_offset": 0, "combine_offset": 8192, "max_tokens": 4, "choices": 2, "num_experts": 2,
                "hidden": 16,
            },
        }.get(kind, {})  # fmt: skip
        for name, value in values.items():  # type: ignore[attr-defined]
            setattr(found, name, value)
        return found

    def right(self, callee: Callee, argument: Argument) -> object:
        """A value that the call takes."""
        native, kind, name = self.native, argument.kind, argument.name
        special: Mapping[tuple[str, str], object] = {
            ("Segment", "data_bytes"): 4096, ("Group", "num_processes"): 1, ("Connections", "sockets"): [-1, -1],
            ("Connections", "index"): 1, ("AllReduceNormOfHosts", "ranks"): [[0]],
            ("AllReduceNormOfHosts", "table"): [(8, native.HostExchange.one_shot)], ("ShardedMixture", "last"): 1,
            ("ExpertWeight", "experts"): 2, ("ExpertWeight", "rows"): 16, ("StreamCrossing", "current"): 0,
            ("PullStreams", "current"): 0,
            ("Connections", "socket"): -1, ("Process", "identity"): native.process_identity(1) or "a:1:1:1:1",
        }  # fmt: skip
        if (callee.owner, name) in special:
            return special[callee.owner, name]
        if name in ADDRESSES:
            return self.address
        if kind == "Group":
            return self.group
        if kind == "ReductionParameters":
            return native.ReductionParameters(*[self.address] * 7, 0)
        if kind == "Connections":
            return native.Connections([-1], 0, 1, 0)
        if kind == "SideStream":
            return native.SideStream(0) if HAS_GPU else None
        if kind.endswith("Site") or kind in ("Layout", "NormSpec"):
            return self.site(kind)
        if "Segment" in kind:
            return [self.segment]
        if "ict[" in kind or "Mapping" in kind:
            return {}
        if hasattr(native, kind) and hasattr(getattr(native, kind), "__members__"):
            return next(iter(getattr(native, kind).__members__.values()))
        starts = {"first": 0, "rank": 0, "host": 0, "fd": 0, "offset": 0, "first_epoch": 0, "peer": 0}
        if kind == "int":
            return starts.get(name, 16 if name in ("hidden", "row_bytes") else 1)
        return {"float": 1.0, "str": "", "bool": False}.get(kind)

    def hostile(self, callee: Callee, argument: Argument) -> Sequence[object]:
        """Values that it should not take, and some at the edge."""
        native, kind, name = self.native, argument.kind, argument.name
        if name in ADDRESSES:
            return (0, None, -1, 2**64)
        if name == "current":  # a stream's handle, which nobody can examine: as an address
            return (None, 1.5, "1", 2**64)
        if name == "data_bytes" or (callee.owner, name) == ("Connections", "timeout_s"):
            return (-1, 0, 2**50, 2**63, 2**64 - 1, 2**64 - 4096, float("nan"), -1.0, None)
        if kind == "int":
            return (*SMALL, *LARGE, None, 1.5, "1")
        if kind == "float":
            return (*FLOATS, None, "1")
        if kind.startswith("str"):
            return (*TEXTS, None, 1)
        if hasattr(native, kind) and hasattr(getattr(native, kind), "__members__"):
            return (*(getattr(native, kind)(each) for each in (77, -1, 2**31 - 1)), None, 0)
        if kind.endswith("Site") or kind in ("Layout", "NormSpec"):
            return (*self._sites(kind), None, 1, self.group)
        if kind == "ReductionParameters":
            return (native.ReductionParameters(), native.ReductionParameters(fp32=2**32 - 1), None, 1, self.group)
        if "Segment" in kind:
            other = native.Segment.create(4096, 1, 0)
            return ([], [None], [self.segment, other], [self.segment, None], None, [1])
        if "ict[" in kind or "Mapping" in kind:
            return ({5: 10}, {-1: 1}, {0: 1}, {2**31 - 1: 1}, {0: b"x"}, {7: b"x"}, {1: 2**62}, {None: 1}, None)
        if "tuple[" in kind:
            known, unknown = native.HostExchange.halving, native.HostExchange(9)
            return ([], [(8, unknown)], [(-1, known)], [(2**63 - 1, known)], [None], None, [(1, None)])
        if "equence[Sequence" in kind or "list[list" in kind:
            return ([], [[]], [[1]], [[-1]], [[0], [1]], [[0], []], [[0, 0]], [[2**31 - 1]], [None], None)
        if "int]" in kind:
            return ([], [0], [-1], [2, -1], [2**31 - 1, -1], [-1] * 5, [None], None)
        return (None, 1, "", self.group)

    def _sites(self, kind: str) -> Iterator[object]:
        """Each of its numbers replaced by each hostile one."""
        names = [name for name in dir(self.site(kind)) if not name.startswith("_")]
        for name in names:
            current = getattr(self.site(kind), name)
            values: Sequence[object] = FLOATS if isinstance(current, float) else (*SMALL, *LARGE)
            if hasattr(current, "__members__"):
                values = [type(current)(each) for each in (77, -1)]
            elif not isinstance(current, int | float):
                values = tuple(self._sites(type(current).__name__)) if type(current).__name__ == "Layout" else ()
            for value in values:
                site = self.site(kind)
                try:
                    setattr(site, name, value)
                except ERRORS:
                    continue
                yield site


STATES = ((), ("enter",), ("enter", "dispatch"), ("enter", "dispatch", "collect"))
"""Steps of a call after which an object gets the next one."""


def needs_gpu(owner: str) -> bool:
    """True for classes whose objects can be made on a host with a GPU only, where there is none."""
    on_device = owner in ("PeerGroup", "PullStreams", "SideStream", "StreamCrossing") or owner.startswith("Gpu")
    return on_device and not HAS_GPU


def _receiver(world: World, callee: Callee, steps: tuple[str, ...]) -> object | None:
    """A fresh object to call a method of, after some steps of a call; None if it has no such steps, or if there is no
    GPU, which it needs."""
    native = world.native
    if callee.owner == "Segment":
        return None if steps else native.Segment.create(4096, 1, 0)
    by_name = {each.name: each for each in callees(native) if each.owner == callee.owner}
    if any(step not in by_name for step in ("__init__", *steps)):
        return None
    world.begin_anew()
    try:
        made: object = getattr(native, callee.owner)(*_right(world, by_name["__init__"]))
    except ERRORS:
        if needs_gpu(callee.owner):
            return None
        raise
    for step in steps:
        getattr(made, step)(*_right(world, by_name[step]))
    return made


def _right(world: World, callee: Callee) -> list[object]:
    return [world.right(callee, each) for each in callee.arguments]


def _calls(world: World, callee: Callee, chance: random.Random) -> Iterator[list[object]]:
    right = _right(world, callee)
    hostile = [world.hostile(callee, each) for each in callee.arguments]
    yield right
    for at, values in enumerate(hostile):
        for value in values:
            yield [*right[:at], value, *right[at + 1 :]]
    for _ in range(NUM_RANDOM if len(right) > 1 else 0):
        yield [chance.choice((value, *values)) for value, values in zip(right, hostile, strict=True)]


def _expect_sane(result: object) -> None:
    """A number that wrapped around is below zero."""
    for each in result if isinstance(result, list | tuple) else (result,):
        num_bytes = getattr(each, "num_bytes", 0)
        assert num_bytes >= 0, f"{each} of {num_bytes} bytes"


def attack(native: ModuleType, callee: Callee, say: Callable[[str], object]) -> int:
    """Makes all calls of one callee; how many."""
    chance, count = random.Random(callee.owner + callee.name), 0
    is_method = callee.owner != "" and callee.name != "__init__" and not callee.is_static
    world = World(native)
    for steps in STATES if is_method else STATES[:1]:
        for arguments in _calls(world, callee, chance):
            if is_method:
                receiver = _receiver(world, callee, steps)
                if receiver is None:
                    break
                function = getattr(receiver, callee.name)
            else:
                owner = getattr(native, callee.owner) if callee.owner else native
                function = owner if callee.name == "__init__" else getattr(owner, callee.name)
            say(f"{callee.owner}.{callee.name}{arguments} after {steps}")
            count += 1
            with suppress(*ERRORS):
                _expect_sane(function(*arguments))
    return count


def main() -> None:
    native = load()
    for callee in callees(native):
        count = attack(native, callee, lambda line: print(line[:500], flush=True))
        print(f"# {callee.owner}.{callee.name}: {count} calls", flush=True)


if __name__ == "__main__":
    sys.exit(main())
