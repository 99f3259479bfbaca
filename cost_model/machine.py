"""Records of a machine in the cost model, which mirror a profile's JSON field by field; units are in the names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from weaveopt.cost_model.compiled import CompiledCosts
from weaveopt.cost_model.energy import PowerCosts
from weaveopt.cost_model.host_exchange import HostExchangeTerms
from weaveopt.cost_model.records import KEYED, NAMED
from weaveopt.cost_model.timed import NOTHING_TIMED, KernelTimes
from weaveopt.records.candidate import Fabric
from weaveopt.records.report import MachineSummary
from weaveopt.records.skew import UNIFORM, Skew

MEASURED = "measured"
TRANSFERS = frozenset({"segment", "ll_packet", "bulk", "posted", "direct"})
"""Transfers of rows between ranks: words of variants and of `FabricCosts.transfers`. Families may have others.

Loads from peers' shared segments; LL packets, words that carry their own arrival; bulk copies (TMA) with a signal after
each; loads that reduce and stores that broadcast, in place.
"""


@dataclass(frozen=True)
class Origin:
    """Origin of numbers. `kind`: `measured`, `datasheet`, `paper` or `estimate`."""

    kind: str
    date: str
    host: str
    note: str
    spread: float | None = None
    """Spread of measured numbers: the median over them of (third quartile - first quartile) / median."""

    def __str__(self) -> str:
        words = " ".join(word for word in (self.kind, self.date, self.host) if word)
        if self.spread is not None:
            words += f" (spread {100 * self.spread:.1f} %)"
        return f"{words}: {self.note}" if self.note else words


@dataclass(frozen=True)
class Point:
    """Time of one message size."""

    bytes: int
    us: float


@dataclass(frozen=True)
class Curve:
    """Time by message size of one operation between `world` ranks; sizes grow, times never fall."""

    origin: str
    op: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, or the operation of a family."""
    variant: str
    """Words that name the kernel, then parameters: `library`, `two_shot`, `two_shot bulk ctas=16`."""
    world: int
    points: tuple[Point, ...]
    row: int = 0
    """Elements of a row at which it was measured; 0: not recorded."""
    first_bytes: int = 0
    """The smallest message that may be read from it; below the first point the time is that point's."""
    last_bytes: int | None = None
    """The largest message that may be read from it; None: any, the last two points' cost per byte goes on."""
    hosts: int = 1
    """Hosts that the ranks are spread over, evenly."""
    row_error: float = 0.0
    """Relative error of times that were read from curves of other rows; 0 of a curve as a profile has it."""

    def __hash__(self) -> int:  # cheap, because curves are keys of caches; equality still compares everything
        return hash((self.op, self.variant, self.world, self.row))

    def covers(self, message_bytes: float) -> bool:
        """True if the curve holds for such a message."""
        return self.first_bytes <= message_bytes and (self.last_bytes is None or message_bytes <= self.last_bytes)


def kernel_name(variant: str) -> str:
    """A variant without its parameters: `two_shot bulk` of `two_shot bulk ctas=16`."""
    return " ".join(word for word in variant.split() if "=" not in word)


@dataclass(frozen=True)
class SizePoint:
    """Time of one size, in whatever the curve counts."""

    size: int
    us: float


@dataclass(frozen=True)
class KernelCurve:
    """Time by size of a kernel of one rank's own; sizes grow, times never fall. Open to every family of kernels."""

    origin: str
    op: str
    """`attention`, `grouped_gemm`, ..."""
    variant: str
    """Words that name the kernel, then what is fixed: `causal heads=16 head_dim=128`."""
    counts: str
    """Unit of a size: `bytes`, `rows`, `keys`, ..."""
    points: tuple[SizePoint, ...]


@dataclass(frozen=True)
class Link:
    """The α–β model of a connection between ranks: `latency_us` a step, `bytes_per_s` per rank and direction."""

    origin: str
    latency_us: float
    bytes_per_s: float
    overhead_us: float = 0.0
    """Processor (or NIC) time of a message at its sender, and again at its receiver. Between hosts only."""

    @property
    def step_us(self) -> float:
        """From the call that sends an empty message to the one that has it: `α + 2 o`."""
        return self.latency_us + 2 * self.overhead_us

    def us(self, num_bytes: float) -> float:
        """Time of `num_bytes` on the wire, without the latency."""
        return num_bytes / self.bytes_per_s * 1e6


@dataclass(frozen=True)
class FabricCosts:
    """A fabric's link, and the curves of everything that was measured on it."""

    fabric: Fabric
    link: Link
    curves: tuple[Curve, ...] = ()
    """A message is what each rank begins with; of an all-gather, what each ends with."""
    inter_host: Link | None = None
    """Link between hosts under this fabric; None: the machine's `inter_host` as it is."""
    transfers: tuple[str, ...] = ()
    """Those of `TRANSFERS` that the devices support, if the profile says so; empty: the fabric's usual ones."""
    link_class: str = ""
    """Link that the times are of: `nvlink`, `pcie_p2p`, `host` (PCIe through host memory); empty: not recorded."""

    def curves_of(self, op: str, variant: str | None = None) -> tuple[Curve, ...]:
        """The curves of an operation within a host; with `variant`, of that one alone."""
        found = (each for each in self.curves if each.hosts == 1 and each.op == op)
        return tuple(each for each in found if variant in (None, each.variant))


@dataclass(frozen=True)
class GemmTile:
    """One output tile `[m, n]` of a GEMM; `flops_per_s` is the rate of the whole machine at full waves of it."""

    m: int
    n: int
    flops_per_s: float


@dataclass(frozen=True)
class Rate:
    """Rate of a GEMM with `m` rows (for machines without waves)."""

    m: int
    flops_per_s: float


@dataclass(frozen=True)
class Samples:
    """Measured GEMMs of a grid: `us` by n, then k, then m (the last runs fastest); 0 where none was measured."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    us: tuple[float, ...]

    def at(self, m: int, n: int, k: int) -> float:
        """Time at a corner of the grid, given by indices."""
        return self.us[(n * len(self.k) + k) * len(self.m) + m]

    def __hash__(self) -> int:
        """Cheap, as that of the costs that hold it."""
        return hash((self.m, self.n, self.k))


@dataclass(frozen=True)
class GemmCosts:
    """GEMMs of one dtype: either tiles in waves over `units` processors, or rates by number of rows."""

    dtype: str
    origin: str
    launch_us: float
    bytes_per_s: float
    units: int = 1
    tiles: tuple[GemmTile, ...] = ()
    rates: tuple[Rate, ...] = ()
    fill_us: float = 0.0
    """Time of a wave in addition to its arithmetic: the first loads and the last stores. Short K-loops pay it often."""
    last_wave: float = 1.0
    """Time of a last wave with almost no tiles, of a full wave's."""
    samples: Samples | None = None
    """Measured times; between its corners the tiles' error is interpolated."""

    def __hash__(self) -> int:
        """Cheap, because GEMMs are priced through caches; equality still compares everything."""
        return hash((self.dtype, self.origin, self.launch_us, self.bytes_per_s, self.fill_us))


@dataclass(frozen=True)
class RowCurve:
    """Time of a kernel that reduces rows (add, norm) by bytes read and written, at one row length in elements."""

    row: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class MemoryCosts:
    """Kernels bound by memory: time by bytes read and written, launch included."""

    origin: str
    floor_us: float
    bytes_per_s: float
    points: tuple[Point, ...] = ()
    norms: tuple[RowCurve, ...] = ()
    """Kernels that reduce rows, where they were measured separately."""


@dataclass(frozen=True)
class AttentionCosts:
    """Attention as compiled models call it: tiles of queries in waves, each a loop over tiles of keys.

    `step_us` is one step of that loop with heads of 128; `causal_step_us` the mean over all steps, skipped ones
    included, of the kernel that skips what a causal mask hides.
    """

    origin: str
    units: int
    tile_q: int
    tile_kv: int
    launch_us: float
    step_us: float
    causal_step_us: float
    bytes_per_s: float


@dataclass(frozen=True)
class ContentionRow:
    """Contention of a GEMM and communication by `ctas` CTAs: each one's time while both run, relative to its time
    alone."""

    ctas: int
    gemm: float
    communication: float


@dataclass(frozen=True)
class CopyContention:
    """Contention of a GEMM and copies from peers by copy engines, as `ContentionRow`."""

    gemm: float
    copies: float


@dataclass(frozen=True)
class Contention:
    """Communication and computation at the same time on one device."""

    origin: str
    rows: tuple[ContentionRow, ...]
    library_ctas: int = 0
    """CTAs that the library's collectives take: NCCL's channels. 0: not known."""
    between_hosts: bool = False
    """True: measured with the library's collectives between hosts, and unknown for those within one."""
    copies: CopyContention | None = None


@dataclass(frozen=True)
class CopyEngine:
    """Copies from a peer without any SM: alone, and while GEMMs run and peers do the same."""

    origin: str
    latency_us: float
    bytes_per_s: float
    contended_bytes_per_s: float


@dataclass(frozen=True)
class LaunchCosts:
    """From the end of one kernel to the start of the next, and what a call of a kernel costs the host."""

    origin: str
    graph_us: float
    """Replayed from a CUDA graph (CPU ranks: a call of a compiled function)."""
    eager_us: float


@dataclass(frozen=True)
class Wiring:
    """Hardware of a host, for people and for `doctor`."""

    origin: str
    processors: int
    """SMs of a GPU, or cores of the host."""
    memory_bytes: int
    """Memory of one device."""
    links: tuple[tuple[str, str], ...]
    """Connections between parts: (`gpus`, `NVLink 4, 18 links through NVSwitch`)."""


@dataclass(frozen=True)
class Machine:
    """A host, or several equal ones, as the cost model sees it. Made by `load`."""

    name: str
    device: str
    """`cpu` or `cuda`."""
    ranks_per_host: int
    """Ranks that a host (or NVLink domain) serves at full speed: its GPUs, or its cores."""
    relative_error: float
    """Error of the difference of two prices at measured points; of a profile without measurements, of any two."""
    origins: tuple[tuple[str, Origin], ...]
    memory: MemoryCosts
    gemms: tuple[GemmCosts, ...] = field(metadata={KEYED: "dtype"})
    inter_host: Link
    fabric_costs: tuple[FabricCosts, ...] = field(metadata={KEYED: "fabric", NAMED: "fabrics"})
    attention: AttentionCosts | None = None
    contention: Contention | None = None
    copy_engine: CopyEngine | None = None
    launch: LaunchCosts | None = None
    wiring: Wiring | None = None
    compiled: CompiledCosts | None = None
    """None: as if nothing were taken beyond."""
    kernels: tuple[KernelCurve, ...] = ()
    """Kernels of a rank's own that have no block above."""
    busy_hosts: tuple[HostExchangeTerms, ...] = ()
    """Times of exchanges between hosts, by numbers of hosts and of ranks on each."""
    skew: Skew = UNIFORM
    """How choices are taken to spread over the experts of mixtures."""
    batch_tokens: int = 512
    imbalance: float = 0.0
    """Tokens of a rank where ranks hold batches of their own, as nobody can compare those; their variation."""
    power: PowerCosts | None = None
    """Energy of kernels, and the limit of what a device draws; None: as if it were never reached."""
    timed: KernelTimes = NOTHING_TIMED
    """Local kernels that were timed at their shapes; asked before the curves. No part of a profile."""
    stands_in: bool = False
    """True if the profile is of other hardware: its prices may be off, together, by as much as they are."""

    def __hash__(self) -> int:  # cheap, because machines are keys of caches; equality still compares everything
        return hash((self.name, self.relative_error, self.timed, self.stands_in))

    @cached_property
    def untimed(self) -> Machine:
        """The machine of the profile alone: the key of caches of what depends on no local kernel."""
        return self if self.timed is NOTHING_TIMED else replace(self, timed=NOTHING_TIMED)

    @property
    def fabrics(self) -> tuple[Fabric, ...]:
        """The fabrics that exist on such a machine. Between hosts, CPU ranks have TCP wherever there is a link."""
        fabrics = tuple(costs.fabric for costs in self.fabric_costs)
        return (*fabrics, Fabric.TCP) if self.device == "cpu" and Fabric.TCP not in fabrics else fabrics

    def oversubscription(self, world: int, hosts: int) -> float:
        """How many times slower a rank runs because ranks share processors: CPU ranks beyond the cores."""
        if self.device != "cpu":
            return 1.0
        return max(1.0, -(-world // hosts) / self.ranks_per_host)

    def summary(self, dtypes: tuple[str, ...] = (), hosts: int | None = None) -> MachineSummary:
        """Name, whether every constant was measured, and the origin of each block of constants. `dtypes` and `hosts`,
        where given, leave out the GEMMs of other dtypes, and on one host the link to another."""
        named = dict(self.origins)
        used = [("memory", self.memory.origin)]
        used += [(f"gemms.{each.dtype}", each.origin) for each in self.gemms if not dtypes or each.dtype in dtypes]
        if hosts != 1:
            used += [("inter_host", self.inter_host.origin)]
            used += [(f"busy_hosts.{each.hosts}x{each.ranks_per_host}", each.origin) for each in self.busy_hosts]
        blocks = {
            "attention": self.attention, "contention": self.contention, "copy_engine": self.copy_engine,
            "launch": self.launch, "wiring": self.wiring, "power": self.power, "compiled": self.compiled,
        }  # fmt: skip
        used += [(name, block.origin) for name, block in blocks.items() if block is not None]
        for costs in self.fabric_costs:
            prefix = f"fabrics.{costs.fabric.value}"
            used.append((f"{prefix}.link", costs.link.origin))
            if hosts != 1 and costs.inter_host is not None:
                used.append((f"{prefix}.inter_host", costs.inter_host.origin))
            for curve in costs.curves:
                if hosts != 1 or curve.hosts == 1:
                    name = kernel_name(curve.variant).replace(" ", ".")
                    between = f".hosts{curve.hosts}" if curve.hosts > 1 else ""
                    used.append((f"{prefix}.{curve.op}.{name}.world{curve.world}{between}", curve.origin))
        for kernel in self.kernels:
            used.append((f"kernels.{kernel.op}.{kernel_name(kernel.variant).replace(' ', '.')}", kernel.origin))
        return MachineSummary(
            name=self.name,
            measured=all(named[origin].kind == MEASURED for _, origin in used),
            # The same kernel with other parameters or rows has the same line.
            origins=tuple((where, str(named[origin])) for where, origin in dict.fromkeys(used)),
        )
