"""What the cost model knows of a machine: records that mirror a profile's JSON, field by field.

Units are in the names (`_us`, `_bytes`, `_per_s`). Every block names its origin, so a report can say of
each constant whether it was measured or taken from a datasheet or a paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from weaveopt.decision import Algorithm, Fabric, Form, MachineSummary

MEASURED = "measured"
FORMS: dict[Fabric, tuple[Form, ...]] = {
    Fabric.SHM: (Form.SEGMENT,),
    Fabric.PEER: (Form.MAIL, Form.BULK),
    Fabric.MULTIMEM: (Form.DIRECT,),
    Fabric.NVSHMEM: (Form.DIRECT,),
    Fabric.LIBRARY: (),
}
"""Forms of the fused kernel that a fabric's devices can run, where the profile does not say."""


@dataclass(frozen=True)
class Origin:
    """Where numbers come from. `kind`: `measured`, `datasheet`, `paper` or `estimate`."""

    kind: str
    date: str
    host: str
    note: str

    def __str__(self) -> str:
        words = " ".join(word for word in (self.kind, self.date, self.host) if word)
        return f"{words}: {self.note}" if self.note else words


@dataclass(frozen=True)
class Point:
    """Time of one message size."""

    bytes: int
    us: float


@dataclass(frozen=True)
class Curve:
    """Time by message size for one algorithm among `world` ranks of one host; sizes grow, times never fall."""

    origin: str
    algorithm: Algorithm
    world: int
    points: tuple[Point, ...]
    form: Form = Form.SEGMENT
    """Of the fused kernel; a bare all-reduce has none."""
    ctas: int = 0
    """CTAs of the fused kernel; 0: as many as are co-resident."""
    hidden: int = 0
    """Row length that it was measured at; 0: not told."""

    @property
    def last_bytes(self) -> int | None:
        """The largest message that may be read from it; None: any (it goes on with its last cost per byte)."""
        # Mail stops where its mailboxes were no longer worth their memory: nothing is known beyond.
        return self.points[-1].bytes if self.form is Form.MAIL else None


@dataclass(frozen=True)
class Link:
    """The α–β model of a way between ranks: `latency_us` a step, `bytes_per_s` per rank and direction."""

    origin: str
    latency_us: float
    bytes_per_s: float

    def us(self, num_bytes: float) -> float:
        """Time of `num_bytes` on the wire, without the latency."""
        return num_bytes / self.bytes_per_s * 1e6


@dataclass(frozen=True)
class FabricCosts:
    """A fabric's link, the measured curves of a bare all-reduce, and those of the fused all-reduce + add + norm."""

    fabric: Fabric
    link: Link
    all_reduce: tuple[Curve, ...] = ()
    all_reduce_norm: tuple[Curve, ...] = ()
    forms: tuple[Form, ...] = ()
    """Forms of the fused kernel that the devices can run, where they differ from `FORMS`."""

    @property
    def usable_forms(self) -> tuple[Form, ...]:
        return self.forms or FORMS[self.fabric]


@dataclass(frozen=True)
class Tile:
    """One output tile `[m, n]` of a product; `flops_per_s` is the rate of the whole machine at full waves of it."""

    m: int
    n: int
    flops_per_s: float


@dataclass(frozen=True)
class Rate:
    """Rate of a product with `m` rows (for machines without waves)."""

    m: int
    flops_per_s: float


@dataclass(frozen=True)
class ProductCosts:
    """Products of one dtype: either tiles in waves over `units` processors, or rates by number of rows."""

    dtype: str
    origin: str
    launch_us: float
    bytes_per_s: float
    units: int = 1
    tiles: tuple[Tile, ...] = ()
    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class MemoryCosts:
    """Kernels bound by memory: time by bytes read and written, launch included."""

    origin: str
    floor_us: float
    bytes_per_s: float
    points: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Machine:
    """A host, or several alike, as the cost model sees it. Made by `load`."""

    name: str
    device: str
    """`cpu` or `cuda`."""
    ranks_per_host: int
    """Ranks that a host (or NVLink domain) serves at full speed: its GPUs, or its cores."""
    relative_error: float
    """The model's own error: a rewrite needs a predicted saving beyond it."""
    origins: tuple[tuple[str, Origin], ...]
    memory: MemoryCosts
    products: tuple[ProductCosts, ...]
    inter_host: Link
    fabric_costs: tuple[FabricCosts, ...]

    def __hash__(self) -> int:
        """Cheap, because machines are keys of caches that every site asks; equality still compares everything."""
        return hash((self.name, self.relative_error))

    @property
    def fabrics(self) -> tuple[Fabric, ...]:
        """The fabrics that exist on such a machine."""
        return tuple(costs.fabric for costs in self.fabric_costs)

    def crowding(self, world: int, hosts: int) -> float:
        """How many times slower a rank runs because ranks share processors (CPU ranks beyond the cores)."""
        if self.device != "cpu":
            return 1.0
        return max(1.0, -(-world // hosts) / self.ranks_per_host)

    def summary(self, dtypes: tuple[str, ...] = (), hosts: int | None = None) -> MachineSummary:
        """Name, whether every constant was measured, and the origin of each block of constants.

        `dtypes` and `hosts`, where given, leave out what such workloads never use: the products of other dtypes,
        and on one host the link to another.
        """
        named = dict(self.origins)
        used = [("memory", self.memory.origin)]
        used += [
            (f"products.{each.dtype}", each.origin) for each in self.products if not dtypes or each.dtype in dtypes
        ]
        if hosts != 1:
            used += [("inter_host", self.inter_host.origin)]
        for costs in self.fabric_costs:
            prefix = f"fabrics.{costs.fabric.value}"
            used.append((f"{prefix}.link", costs.link.origin))
            used += [(f"{prefix}.all_reduce.{c.algorithm.value}.world{c.world}", c.origin) for c in costs.all_reduce]
            for curve in costs.all_reduce_norm:
                form = "" if curve.form is Form.SEGMENT else f".{curve.form.value}"
                where = f"{prefix}.all_reduce_norm.{curve.algorithm.value}{form}.world{curve.world}"
                used.append((where, curve.origin))
        return MachineSummary(
            name=self.name,
            measured=all(named[origin].kind == MEASURED for _, origin in used),
            # The same kernel with other CTAs or rows has the same line.
            origins=tuple((where, str(named[origin])) for where, origin in dict.fromkeys(used)),
        )
