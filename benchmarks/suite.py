"""Declaration of a benchmark suite: its cases, baselines and variants, what it needs, and what a run may set."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from weaveopt.wording import counted

if TYPE_CHECKING:
    from benchmarks.ranks import Place
    from benchmarks.record import Row

T = TypeVar("T")
CPU, GPU = "cpu", "gpu"


class UsageError(ValueError):
    """Input that the user has to change; the message is one line."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value of a suite that `--set name=value` replaces: a number, a text, 0 or 1, or several separated by commas."""

    name: str
    default: T
    about: str = ""
    quick: T | None = None
    """Default of `--quick`; None: the same."""
    among: Sequence[str] = ()
    """The only texts allowed; empty: any."""

    def parse(self, text: str) -> T:
        several = isinstance(self.default, tuple)
        kind = type(self.default[0]) if isinstance(self.default, tuple) and self.default else type(self.default)
        words = [word for word in text.split(",") if word] if several else [text]
        found = [self._one(str if kind is tuple else kind, word) for word in words]
        return cast(T, tuple(found) if several else found[0])

    def _one(self, kind: type, word: str) -> object:
        if self.among and word not in self.among:
            raise UsageError(f"--set {self.name}: found {word!r}, expected one of {', '.join(self.among)}")
        try:
            if kind is bool:
                return {"0": False, "1": True}[word]
            return kind(word)
        except (KeyError, ValueError):
            expected = {bool: "0 or 1", int: "an integer", float: "a number"}[kind]
            raise UsageError(f"--set {self.name}: found {word!r}, expected {expected}") from None


@dataclass(frozen=True)
class Asked:
    """Choices of a command line for a suite."""

    machine: str
    """Folder of `benchmarks/results/` for the figures."""
    quick: bool = False
    values: Mapping[str, str] = field(default_factory=dict)
    """Values of `--set`, by name."""

    def of(self, setting: Setting[T]) -> T:
        """The setting's value in this run. Raises `UsageError`."""
        if setting.name in self.values:
            return setting.parse(self.values[setting.name])
        return setting.default if setting.quick is None or not self.quick else setting.quick


@dataclass(frozen=True)
class Needs:
    """The host that a suite runs on."""

    device: str
    ranks: int = 1
    """At least so many."""
    worlds: tuple[int, ...] = ()
    """Numbers of ranks to run with, those that fit; empty: as many as there are GPUs. 0: no ranks, this process."""
    emulated_hosts: bool = False
    machines: tuple[str, ...] = ()
    """The only values of `--machine` allowed; empty: any."""

    def lack(self, machine: str) -> str:
        """Says what this host does not have; empty: nothing."""
        import torch

        if self.machines and machine not in self.machines:
            return f"--machine {' or '.join(self.machines)}"
        if self.emulated_hosts:
            from tests.emulation import emulated_hosts

            why = emulated_hosts.missing()
            return f"emulated hosts: {why}" if why else ""
        found = torch.cuda.device_count()
        if self.device == GPU and found < self.ranks:
            return f"{counted(self.ranks, 'GPU')}, found {found}"
        return ""

    def worlds_of(self, quick: bool) -> tuple[int, ...]:
        """Numbers of ranks of a run on this host."""
        import torch

        if not self.worlds:
            return (torch.cuda.device_count(),)
        fit = [world for world in self.worlds if self.device == CPU or world <= torch.cuda.device_count()]
        return tuple(fit[:1] if quick else fit)

    def __str__(self) -> str:
        if self.emulated_hosts:
            return "root and ip, for emulated hosts"
        if self.device == CPU:
            return "CPU" if self.worlds == (0,) else "CPU ranks"
        if self.worlds:
            return f"{' or '.join(map(str, sorted(self.worlds)))} GPU{'' if self.worlds == (1,) else 's'}"
        return "2 or more GPUs"


class Case(Protocol):
    """A frozen dataclass of scalars."""

    __dataclass_fields__: object  # type: ignore[assignment]


C = TypeVar("C")


@dataclass(frozen=True)
class Suite(Generic[C]):
    """One result file: cases, and the variants and baselines that each is measured with."""

    name: str
    about: str
    needs: Needs
    cases: Callable[[Asked], Sequence[C]]
    """Frozen dataclasses, in the order in which they are measured. Raises `UsageError`; needs no GPU."""
    rows: Callable[[Place, Sequence[C], Asked], Iterator[Row]]
    """Measures the cases, on every rank; a row as soon as it is known."""
    ours: tuple[str, ...]
    baselines: tuple[str, ...]
    predicted: str = ""
    """Meaning of `predicted_us` in rows; empty: nothing is predicted."""
    bound: str = ""
    """Meaning of `bound_us` in rows; empty: there is none."""
    settings: tuple[Setting[object], ...] = ()
    by_name_only: bool = False
    """Not part of `--all`."""
    replaces: bool = False
    """Rows of an earlier run do not stay in the result file."""
    trains: bool = False
    """Records gradients."""
    prepare: Callable[[], None] | None = None
    """Runs once on each rank before anything else."""


def words_of(case: object) -> list[str]:
    """`name=value` of every field."""
    return [f"{each.name}={getattr(case, each.name)}" for each in fields(case)]  # type: ignore[arg-type]


def selected(cases: Sequence[C], filters: Sequence[str]) -> list[C]:
    """Cases that have all words of any filter, as `name=value` or `value`; all without filters."""

    def has(case: C, text: str) -> bool:
        words = words_of(case)
        every = {*words, *(word.partition("=")[2] for word in words)}
        return all(word in every for word in text.split())

    return [case for case in cases if not filters or any(has(case, text) for text in filters)]


def product(kind: Callable[..., C], *axes: Sequence[object]) -> list[C]:
    """A case for every combination, the last axis changing first."""
    return [kind(*values) for values in itertools.product(*axes)]
