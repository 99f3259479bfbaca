"""Every option of weaveopt and every `WEAVE_*` variable, in one table.

An option comes from `torch.compile(..., options={name: value})`, else from its environment variable, else from its
default. Options of Inductor are passed to Inductor unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from weaveopt.errors import OptionError, closest
from weaveopt.records.candidate import Fabric
from weaveopt.records.skew import Skew

OptionValue = bool | int | float | str | tuple[str, ...] | None


@dataclass(frozen=True)
class Option:
    """One row of the table. `name` is also a field of `Config`."""

    name: str
    env: str
    default: OptionValue
    help: str
    least: float = 0
    most: float = 0
    """Largest value of a numeric option. Never infinite: it ends in a timer, a native count or the size of a buffer."""
    unit: str = "seconds"
    """Unit of an option that is no whole number."""
    own: bool = False
    """True for a name of a file or folder: every rank has its own file system, so ranks may differ in it."""
    is_number: bool = False
    """True for a number whose default, None, depends on the machine."""

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        if isinstance(self.default, bool):
            return "True or False"
        if isinstance(self.default, tuple):
            return "a list of names"
        if isinstance(self.default, int):
            return f"a whole number from {int(self.least)} to {int(self.most)}"
        if isinstance(self.default, float) or self.is_number:
            return f"{self.unit} from {self.least:g} to {self.most:.0f}"
        return "a name or a file"


SHORTEST_S, LONGEST_S = 1e-3, 1e6
"""Shortest and longest wait. Eleven days in milliseconds still fit 31 bits, and in nanoseconds 63."""
MOST_TOKENS, MOST_BYTES = (1 << 31) - 1, 1 << 48

OPTIONS: tuple[Option, ...] = (
    Option("strict", "WEAVE_STRICT", False, "raise where a step fails instead of running the unrewritten graph"),
    Option("disable", "WEAVE_DISABLE", (), "rules that may not be used"),
    Option("force", "WEAVE_FORCE", (), "rules used wherever they are allowed, whatever the cost model predicts"),
    Option(
        "fabrics",
        "WEAVE_FABRICS",
        (),
        "fabrics that may be used besides the library (default: all that reach the ranks)",
    ),
    Option(
        "machine",
        "WEAVE_MACHINE",
        None,
        "machine profile: a shipped name or a JSON file (default: what is found)",
        own=True,
    ),
    Option("verify", "WEAVE_VERIFY", False, "time the best candidates on the ranks, and choose by that"),
    Option(
        "verify_budget_s", "WEAVE_VERIFY_BUDGET_S", 60.0, "longest time that this takes for one graph", most=LONGEST_S
    ),
    Option(
        "tune_budget_s",
        "WEAVE_TUNE_BUDGET_S",
        None,
        "longest time in which local kernels of one graph are timed; small graphs get less (0: none is timed)",
        most=LONGEST_S,
        is_number=True,
    ),
    Option(
        "tune_cache",
        "WEAVE_TUNE_CACHE",
        None,
        "folder that keeps those times (default: ~/.cache/weaveopt)",
        own=True,
    ),
    Option("cuda_graphs", "WEAVE_CUDA_GRAPHS", False, "let Inductor replay the compiled graph as a CUDA graph"),
    Option(
        "max_tokens",
        "WEAVE_MAX_TOKENS",
        8192,
        "largest token count planned for where a shape is dynamic",
        least=1,
        most=MOST_TOKENS,
    ),
    Option(
        "arena_bytes",
        "WEAVE_ARENA_BYTES",
        0,
        "least symmetric memory of a group (0: what the plan needs)",
        most=MOST_BYTES,
    ),
    Option(
        "timeout_s",
        "WEAVE_TIMEOUT_S",
        120.0,
        "longest wait for a peer inside an operation",
        least=SHORTEST_S,
        most=LONGEST_S,
    ),
    Option(
        "skew", "WEAVE_SKEW", None, "share of a mixture's rows on a share of its experts: 0.5:0.125 (default: uniform)"
    ),
    Option(
        "batch_tokens",
        "WEAVE_BATCH_TOKENS",
        512,
        "tokens of a rank, in estimates of mixtures whose ranks hold batches of their own",
        least=1,
        most=MOST_TOKENS,
    ),
    Option(
        "imbalance",
        "WEAVE_IMBALANCE",
        0.0,
        "coefficient of variation of these tokens between the ranks",
        most=2,
        unit="a number",
    ),
    Option(
        "expert_cache_bytes",
        "WEAVE_EXPERT_CACHE_BYTES",
        0,
        "bytes of other ranks' experts that a rank keeps for good, of each layer, where it fetches experts ahead",
        most=MOST_BYTES,
    ),
    Option(
        "compile_timeout_s",
        "WEAVE_COMPILE_TIMEOUT_S",
        1800.0,
        "longest wait for a peer that is still compiling",
        least=SHORTEST_S,
        most=LONGEST_S,
    ),
)

OWN_OF_INDUCTOR = (
    "trace.", "disable_progress", "verbose_progress", "log_tlparse", "autoheuristic_log_path",
    "torchinductor_worker_logpath", "profile_bandwidth_output", "triton.proton_output_dir",
    "compile_threads", "worker_",
    "global_cache_dir", "fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache", "autotune_remote_cache",
    "bundled_autotune_remote_cache", "remote_gemm_autotune_cache",
    "cpp.cxx", "cuda.cuda_cxx", "cuda.cutlass_dir", "cutlass.cutlass_dir",
)  # fmt: skip
"""How names of Inductor's options begin that are each rank's own: what it logs and where, its processes, its caches,
and where compilers and sources are."""

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
    fabrics: tuple[str, ...] = ()
    machine: str | None = None
    verify: bool = False
    verify_budget_s: float = 60.0
    tune_budget_s: float | None = None
    tune_cache: str | None = None
    cuda_graphs: bool = False
    max_tokens: int = 8192
    arena_bytes: int = 0
    timeout_s: float = 120.0
    skew: str | None = None
    batch_tokens: int = 512
    imbalance: float = 0.0
    expert_cache_bytes: int = 0
    compile_timeout_s: float = 1800.0
    inductor: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    """Options passed on to Inductor."""

    def agreed(self) -> dict[str, str]:
        """Options that must be the same on every rank of a group, as text.

        Names of files are not: a profile's constants are compared, wherever a rank reads them, and times of local
        kernels are exchanged.
        """
        own = {option.name for option in OPTIONS if option.own}
        found = {f.name: str(getattr(self, f.name)) for f in fields(self) if f.name not in own}
        found["inductor"] = str(tuple(pair for pair in self.inductor if not pair[0].startswith(OWN_OF_INDUCTOR)))
        return found


def known_options() -> tuple[str, ...]:
    return tuple(option.name for option in OPTIONS)


def variable(name: str) -> str:
    """The environment variable without blanks around it; empty where it is not set. Launchers set empty ones."""
    return os.environ.get(name, "").strip()


def _parse(option: Option, text: str) -> OptionValue:
    """The value of the option's variable. Raises `ValueError` for what is of another type."""
    default = option.default
    if isinstance(default, bool):
        lowered = text.lower()
        if lowered in {"1", "true", "yes", "on"}:
            return True
        if lowered in {"0", "false", "no", "off"}:
            return False
        raise ValueError("expected 0 or 1")
    if isinstance(default, tuple):
        return tuple(text.replace(",", " ").split())
    if isinstance(default, int | float) or option.is_number:
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"expected {option.expected}") from None
    return text


def _checked(option: Option, value: object) -> OptionValue:
    """`value` in the option's type. Raises `ValueError` that says what is expected."""
    default = option.default
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
    elif isinstance(default, tuple):
        words = (value,) if isinstance(value, str) else value
        if isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
            return tuple(words)
    elif isinstance(default, int | float) or (option.is_number and value is not None):
        # Compared before it is converted: an integer of thousands of digits has no float, and NaN is in no range.
        if isinstance(value, int | float) and not isinstance(value, bool) and option.least <= value <= option.most:
            kept = int(value) if isinstance(default, int) else float(value)
            if kept == value:
                return kept
    elif option.name == "skew" and isinstance(value, str):
        return str(Skew.parse(value))
    elif value is None or (isinstance(value, str | os.PathLike) and os.fspath(value)):
        return value if value is None else str(os.fspath(value))
    raise ValueError(f"expected {option.expected}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


_LONGEST_SHOWN = 60


def _value(option: Option, given: dict[str, OptionValue]) -> OptionValue:
    """The option's value, taken out of `given` where it is there."""
    text = variable(option.env)
    try:
        if option.name in given:
            value = given.pop(option.name)
            where = f"option {option.name!r}: got {_shown(value)}"
            return _checked(option, value)
        where = f"{option.env}={_shown(text)}"
        return _checked(option, _parse(option, text)) if text else option.default
    except ValueError as error:
        raise OptionError(f"{where}, {error}") from None


def resolve(
    options: Mapping[str, OptionValue] | None = None,
    inductor_options: tuple[str, ...] = (),
    rules: tuple[str, ...] = (),
) -> Config:
    """Options over environment over defaults.

    `inductor_options` are the names that Inductor accepts, `rules` the names that `disable` and `force`
    may hold. Raises `OptionError` for anything unknown, naming the nearest known word, and for values out
    of range. An empty variable counts as not set.
    """
    given = dict(options or {})
    values: dict[str, OptionValue] = {}
    for option in OPTIONS:
        values[option.name] = _value(option, given)
    inductor = []
    for name in sorted(given):
        accepted = name.replace("-", "_")  # torch's backend takes either
        if accepted not in inductor_options:
            hint = closest(name, known_options() + inductor_options)
            if not hint.startswith("did you mean"):  # Inductor has hundreds
                hint = f"{closest(name, known_options())}, and what Inductor takes (torch._inductor.list_options())"
            raise OptionError(f"unknown option {name!r} for backend 'weave': {hint}")
        inductor.append((accepted, given[name]))
    for option_name in ("disable", "force"):
        words = values[option_name]
        for word in words if isinstance(words, tuple) else ():
            if rules and word not in rules:
                raise OptionError(f"option {option_name!r}: unknown rule {word!r}: {closest(word, rules)}")
    known = tuple(fabric.value for fabric in Fabric)
    asked = values["fabrics"]
    for word in asked if isinstance(asked, tuple) else ():
        if word not in known:
            raise OptionError(f"option 'fabrics': unknown fabric {word!r}: {closest(word, known)}")
    return Config(inductor=tuple(inductor), **values)  # type: ignore[arg-type]
