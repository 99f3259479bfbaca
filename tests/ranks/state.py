"""The state of a process that outlives a test: what a warm rank restores, and what it cannot and therefore ends for.

Restored: the process group, what Dynamo compiled, weaveopt's arenas and records, configurations of torch, random
numbers, the working directory. Not restored: a function, class or method that was replaced, and threads.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
import torch.fx.experimental._config

from weaveopt.fabrics import shm, tcp, watchdog

CONFIGURATIONS = (
    torch._dynamo.config, torch._inductor.config, torch._functorch.config, torch.fx.experimental._config
)  # fmt: skip
PATCHED = ("os", "time", "socket", "torch", "torch.cuda", "torch._inductor.compile_fx", "torch._dynamo.guards")
PATCHED_BELOW = "torch.distributed"
"""Modules, besides weaveopt's, in which tests may replace functions."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
MOST_MEMORY_KB = 2 << 20
Container = dict | list | set | weakref.WeakKeyDictionary | weakref.WeakSet  # type: ignore[type-arg]


@dataclass(frozen=True)
class _Counter:
    """Position of an `itertools.count`."""

    written: str

    def again(self) -> itertools.count[int]:
        return itertools.count(int(self.written.removeprefix("count(").removesuffix(")")))


@dataclass(frozen=True)
class State:
    """State of a process before any test has run in it."""

    functions: list[tuple[str, Mapping[str, object], dict[str, object]]]
    """Functions of each module and class: its name, its names as they are at any time, and what these were."""
    modules: dict[str, ModuleType]
    """Modules that have them."""
    values: dict[str, dict[str, object]]
    """Other attributes of weaveopt's modules, by module."""
    containers: list[tuple[Container, Container]]
    """The dictionaries, lists and sets of these modules and of their classes, and what was in them."""
    configurations: tuple[dict[str, object], ...]
    random_numbers: tuple[object, torch.Tensor]
    directory: str
    path: tuple[str, ...]
    signals: tuple[object, ...]

    @classmethod
    def now(cls) -> State:
        return cls(
            functions=list(_functions()),
            modules=dict(_with_functions()),
            values={name: dict(_values(module)) for name, module in _modules()},
            containers=[(value, copy.copy(value)) for _, module in _modules() for value in _containers(module)],
            configurations=tuple(each.get_config_copy() for each in CONFIGURATIONS),  # type: ignore[attr-defined]
            random_numbers=(random.getstate(), torch.get_rng_state()),
            directory=os.getcwd(),
            path=tuple(sys.path),
            signals=tuple(map(signal.getsignal, SIGNALS)),
        )

    def restore(self) -> str:
        """Makes this process what it was; says what cannot be restored."""
        if dist.is_initialized():
            dist.destroy_process_group()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for fabric in (shm, tcp):
            fabric.release_all()
        torch.set_default_dtype(torch.float32)
        changed = [name for name, module in self.modules.items() if sys.modules.get(name) is not module]
        for owner, names, kept in self.functions:
            changed += [f"{owner}.{name}" for name, value in kept.items() if names.get(name) is not value]
        for name, module in _modules():
            for attribute, value in self.values.get(name, {}).items():
                if isinstance(value, _Counter):
                    setattr(module, attribute, value.again())
                elif not isinstance(vars(module).get(attribute), threading.Thread):
                    setattr(module, attribute, value)
        for container, kept in self.containers:
            _fill(container, kept)
        for config, values in zip(CONFIGURATIONS, self.configurations, strict=True):
            for key, value in config.get_config_copy().items():  # type: ignore[attr-defined]
                if value != values[key]:
                    setattr(config, key, copy.copy(values[key]))
        random.setstate(self.random_numbers[0])  # type: ignore[arg-type]
        torch.set_rng_state(self.random_numbers[1])
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        os.chdir(self.directory)
        sys.path[:] = self.path
        gc.collect()
        gc.freeze()  # what stays is not looked through again after each of the next tests
        changed += [f"thread {each.name}" for each in threading.enumerate() if not _stays(each)]
        changed += ["a signal's handler"] * (tuple(map(signal.getsignal, SIGNALS)) != self.signals)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY_KB:
            changed.append("memory")
        return ", ".join(changed)


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Those of weaveopt."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith("weaveopt") and isinstance(module, ModuleType):
            yield name, module


def _values(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if not name.startswith("__") and not callable(value) and not isinstance(value, ModuleType):
            yield name, _Counter(repr(value)) if isinstance(value, itertools.count) else value


def _containers(module: ModuleType) -> Iterator[Container]:
    owners = [module, *(value for value in vars(module).values() if _is_class_of(value, module))]
    for owner in owners:
        for name, value in tuple(vars(owner).items()):
            if not name.startswith("__") and isinstance(value, Container):
                yield value


def _fill(container: Container, values: Container) -> None:
    """Has `container` hold `values` and nothing else."""
    container.clear()
    if isinstance(container, list):
        container.extend(values)
    else:
        container.update(values)  # type: ignore[arg-type]


def _with_functions() -> Iterator[tuple[str, ModuleType]]:
    """Modules in which tests may replace functions."""
    yield from _modules()
    yield from ((name, module) for name, module in tuple(sys.modules.items()) if _may_be_patched(name))


def _functions() -> Iterator[tuple[str, Mapping[str, object], dict[str, object]]]:
    """Functions, classes and methods, and modules that modules have."""
    for name, module in _with_functions():
        names = vars(module)
        yield name, names, dict(_replaceable(names))
        for attribute, value in tuple(names.items()):
            if _is_class_of(value, module):
                yield f"{name}.{attribute}", vars(value), dict(_methods(value))


def _replaceable(names: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in tuple(names.items()):
        if callable(value) or _is(value, ModuleType):
            yield name, value


def _methods(owner: object) -> Iterator[tuple[str, object]]:
    for name, value in tuple(vars(owner).items()):
        if callable(value) or isinstance(value, property | classmethod | staticmethod):
            yield name, value


def _may_be_patched(name: str) -> bool:
    return name in PATCHED or name.startswith(PATCHED_BELOW)


def _is(value: object, kind: type) -> bool:
    """Without asking the value, which for some of torch's is deprecated."""
    return issubclass(type(value), kind)


def _is_class_of(value: object, module: ModuleType) -> bool:
    return _is(value, type) and vars(value).get("__module__") == module.__name__


def _stays(thread: threading.Thread) -> bool:
    """True for the watchdog's thread, which has nothing to watch now, and for Inductor's, which wait for work."""
    is_inductors = thread.name.startswith("ThreadPoolExecutor-")
    return thread is threading.main_thread() or thread is watchdog._thread or is_inductors
