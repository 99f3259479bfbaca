"""Every option of weaveopt and every `WEAVE_*` variable, in one table.

An option comes from `torch.compile(..., options={name: value})`, else from its environment variable, else
from its default. Options that weaveopt does not know but Inductor does go on to Inductor unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from weaveopt.errors import OptionError, closest
from weaveopt.records.skew import Skew

OptionValue = bool | int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Option:
    """One row of the table. `name` is also a field of `Config`."""

    name: str
    env: str
    default: OptionValue
    help: str


OPTIONS: tuple[Option, ...] = (
    Option("strict", "WEAVE_STRICT", False, "raise where a step fails instead of running the unrewritten graph"),
    Option("disable", "WEAVE_DISABLE", (), "rules that may not be used"),
    Option("force", "WEAVE_FORCE", (), "rules used wherever they are allowed, whatever the cost model predicts"),
    Option("machine", "WEAVE_MACHINE", None, "machine profile: a shipped name or a JSON file (default: what is found)"),
    Option("verify", "WEAVE_VERIFY", False, "time the best candidates on the ranks, and choose by that"),
    Option("verify_budget_s", "WEAVE_VERIFY_BUDGET_S", 60.0, "longest time that this takes for one graph"),
    Option("cuda_graphs", "WEAVE_CUDA_GRAPHS", False, "let Inductor replay the compiled graph as a CUDA graph"),
    Option("max_tokens", "WEAVE_MAX_TOKENS", 8192, "largest token count planned for where a shape is dynamic"),
    Option("arena_bytes", "WEAVE_ARENA_BYTES", 0, "least symmetric memory of a group (0: what the plan needs)"),
    Option("timeout_s", "WEAVE_TIMEOUT_S", 120.0, "longest wait for a peer inside an operation"),
    Option(
        "skew", "WEAVE_SKEW", None, "share of a mixture's rows on a share of its experts: 0.5:0.125 (default: uniform)"
    ),
    Option("compile_timeout_s", "WEAVE_COMPILE_TIMEOUT_S", 1800.0, "longest wait for a peer that is still compiling"),
)

BUILD_VARIABLES: tuple[tuple[str, str], ...] = (
    ("WEAVE_CUDA", "0, 1 or auto: build the CUDA part (auto: where nvcc is, and GPUs or WEAVE_CUDA_ARCHS)"),
    ("WEAVE_CUDA_ARCHS", "GPU architectures to build for: all, or such as 80;90 (default: those of the GPUs here)"),
)


@dataclass(frozen=True)
class Config:
    """Options of one compile, resolved and checked."""

    strict: bool = False
    disable: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    machine: str | None = None
    verify: bool = False
    verify_budget_s: float = 60.0
    cuda_graphs: bool = False
    max_tokens: int = 8192
    arena_bytes: int = 0
    timeout_s: float = 120.0
    skew: str | None = None
    compile_timeout_s: float = 1800.0
    inductor: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    """Options handed on to Inductor."""

    def agreed(self) -> dict[str, str]:
        """What must be the same on every rank of a group, as text."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}


def known_options() -> tuple[str, ...]:
    return tuple(option.name for option in OPTIONS)


def _parse(option: Option, text: str) -> OptionValue:
    default = option.default
    if isinstance(default, bool):
        lowered = text.strip().lower()
        if lowered in {"1", "true", "yes", "on"}:
            return True
        if lowered in {"0", "false", "no", "off", ""}:
            return False
        raise OptionError(f"{option.env}={text!r}: expected 0 or 1")
    if isinstance(default, tuple):
        return tuple(word for word in text.replace(",", " ").split() if word)
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            raise OptionError(f"{option.env}={text!r}: expected {type(default).__name__}") from None
    return text or None


def _checked(option: Option, value: OptionValue | list[str]) -> OptionValue:
    """`value` in the option's type, or an OptionError that names option, value and what is expected."""
    default = option.default
    where = f"option {option.name!r}: got {value!r}"
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise OptionError(f"{where}, expected True or False")
        return value
    if isinstance(default, tuple):
        words = (value,) if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise OptionError(f"{where}, expected a list of names")
        return tuple(words)
    if isinstance(default, int | float):
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
            raise OptionError(f"{where}, expected a number of at least 0")
        if option.name.endswith("timeout_s") and value == 0:
            raise OptionError(f"{where}, expected more than 0 seconds")
        return type(default)(value)
    if option.name == "skew" and isinstance(value, str):
        try:
            return str(Skew.parse(value))
        except ValueError as error:
            raise OptionError(f"{where}: {error}") from None
    if value is not None and not isinstance(value, str):
        raise OptionError(f"{where}, expected a name or a file")
    return value


def resolve(
    options: Mapping[str, OptionValue] | None = None,
    inductor_options: tuple[str, ...] = (),
    rules: tuple[str, ...] = (),
) -> Config:
    """Options over environment over defaults.

    `inductor_options` are the names that Inductor accepts, `rules` the names that `disable` and `force`
    may hold. Raises `OptionError` for anything unknown, naming the nearest known word.
    """
    given = dict(options or {})
    values: dict[str, OptionValue] = {}
    for option in OPTIONS:
        if option.name in given:
            values[option.name] = _checked(option, given.pop(option.name))
        elif option.env in os.environ:
            values[option.name] = _checked(option, _parse(option, os.environ[option.env]))
        else:
            values[option.name] = option.default
    inductor = []
    for name in sorted(given):
        if name not in inductor_options:
            hint = closest(name, known_options() + inductor_options)
            if not hint.startswith("did you mean"):  # Inductor has hundreds
                hint = f"{closest(name, known_options())}, and what Inductor takes (torch._inductor.list_options())"
            raise OptionError(f"unknown option {name!r} for backend 'weave': {hint}")
        inductor.append((name, given[name]))
    for option_name in ("disable", "force"):
        words = values[option_name]
        for word in words if isinstance(words, tuple) else ():
            if rules and word not in rules:
                raise OptionError(f"option {option_name!r}: unknown rule {word!r}: {closest(word, rules)}")
    return Config(inductor=tuple(inductor), **values)  # type: ignore[arg-type]
