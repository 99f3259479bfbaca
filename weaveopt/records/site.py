"""Sites: places in a captured graph that could be rewritten."""

from __future__ import annotations

from dataclasses import dataclass, field

from weaveopt.records.candidate import Rejection, Values

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
        """True if the compiled graph is used for this token count only."""
        return self.most == self.hint and self.least in (0, self.hint)


@dataclass(frozen=True)
class Site:
    """A place in a captured graph that could be rewritten. It belongs to no rule."""

    id: str
    kind: str
    """Kind of the matcher that found it: `reduction`, `mixture`, `attention`, `all_gather`, `reduce_scatter`."""
    groups: tuple[str, ...]
    """Names of the process groups that it communicates in; empty for a local site."""
    module: str
    """Path of its module, for people; no decision depends on it."""
    collectives: tuple[str, ...] = ()
    """Names of the graph nodes whose communication this site stands for."""
    description: str = ""
    """The computation in words of torch: `all_reduce(mm) + residual -> rms_norm(eps=1e-05)`."""
    tokens: TokenCounts = TokenCounts(0)
    facts: Values = ()
    """Facts found by the matcher, for the report and for the comparison between ranks."""
    rejections: tuple[Rejection, ...] = ()
    """Reasons that hold for every rule: the matcher did not recognize the place."""
    count: int = 1
    """How many places of the whole model this one stands for (layers of the same kind)."""
    own_facts: tuple[str, ...] = field(default=(), compare=False)
    """Names of facts that concern this rank alone: the width of its shard, a bias that its GEMM adds."""
    own_text: str = field(default="", compare=False)
    """The end of `description` that concerns this rank alone: which node keeps a norm from being in the site."""
