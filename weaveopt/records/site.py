"""Sites: places in a captured graph that could be rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.records.candidate import Rejection, Values


@dataclass(frozen=True)
class Product:
    """The matrix product `a[m, k] @ b[k, n]` that makes a rank's partial result (`k` is this rank's share)."""

    m: int
    k: int
    n: int


@dataclass(frozen=True)
class Workload:
    """What one site computes on every rank, unfused: all-reduce of `[tokens, hidden]`, add, norm.

    `tokens` is the token count that estimates are made for (the hint, if shapes are dynamic);
    `max_tokens` is the largest count that the compiled graph may see (equal to `tokens` if static).
    """

    tokens: int
    max_tokens: int
    hidden: int
    dtype: str
    world: int
    hosts: int = 1
    product: Product | None = None
    num_partials: int = 1
    """All-reduces that meet in one sum (two where a mixture and its shared experts are added)."""
    num_norms: int = 1
    has_residual: bool = True
    sum_is_used: bool = True
    """Whether the graph reads the sum (partials + residual) after this site."""
    sum_may_shard: bool = False
    """Whether only other sites read the sum, as their residual: then every rank may keep just its own token rows."""
    out_dtype: str = ""
    """Of the normed rows, where it is not `dtype`."""
    min_tokens: int = 0
    """The least count that the compiled graph may see, where its count is not fixed; 0: nothing is known."""

    @property
    def is_static(self) -> bool:
        """Whether the compiled graph sees this one count only."""
        return self.max_tokens == self.tokens and self.min_tokens in (0, self.tokens)

    @property
    def message_bytes(self) -> int:
        return self.tokens * self.hidden * DTYPE_BYTES[self.dtype]


DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a site: the one that estimates are made for, and those that the compiled graph may see."""

    hint: int
    least: int = 0
    """0: nothing is known."""
    most: int = 0
    """0: `hint`."""

    def __post_init__(self) -> None:
        if not self.most:
            object.__setattr__(self, "most", self.hint)

    @property
    def is_static(self) -> bool:
        """Whether the compiled graph sees this one count only."""
        return self.most == self.hint and self.least in (0, self.hint)


@dataclass(frozen=True)
class Site:
    """A place in a captured graph that could be rewritten. It belongs to no rule."""

    id: str
    kind: str
    """Which matcher found it: `reduction`, `mixture`, `attention`."""
    groups: tuple[str, ...]
    """Names of the process groups that it communicates in; empty for a local site."""
    module: str
    """Path of the module that it lies in, for people; no decision rests on it."""
    collectives: tuple[str, ...] = ()
    """Names of the graph nodes whose communication this site stands for."""
    description: str = ""
    """The computation in words of torch: `all_reduce(mm) + residual -> rms_norm(eps=1e-05)`."""
    tokens: TokenCounts = TokenCounts(0)
    facts: Values = ()
    """What the matcher found, for the report and for the comparison between ranks."""
    rejections: tuple[Rejection, ...] = ()
    """Reasons that hold for every rule: the matcher did not recognize the place."""
    count: int = 1
    """How many places of the whole model this one stands for (layers of the same kind)."""
