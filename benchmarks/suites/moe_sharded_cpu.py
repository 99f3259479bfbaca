"""`weave::expert_exchange` on CPU ranks, against transformers' all-to-all and all-gather + reduce-scatter.

One thread each, bf16; every rank has as many tokens of its own, routed uniformly or with half of all tokens on an
eighth of the experts (at least one). The baselines are transformers' own classes: `AllToAllEP` with `grouped_mm`, and
the same experts on gathered tokens, foreign ones masked, whose sums a reduce-scatter adds. The bound is the experts
alone on as many rows as come to a rank on average, in the order in which they need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite, product
from benchmarks.timing import Effort, Step, host_us
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.records.candidate import Fabric

DTYPE = torch.bfloat16
TOKENS = Setting("tokens", (8, 64, 512, 2048), "of a rank", quick=(8,))
GROUP = "0"
TIMEOUT_S = 120.0
ALL_TO_ALL, GATHER, LIBRARY_OP, EXPERTS = "gloo_all_to_all", "gloo_all_gather", "through_library", "experts"
BATCHES = {"whole": 1, "own_first": 2}
WEAVE = "own_first"
"""Variant of `weave_us`: the op's default."""


@dataclass(frozen=True)
class Shape:
    """A mixture; `experts` are those of all ranks together, a multiple of every world."""

    hidden: int
    inner: int
    experts: int
    choices: int


SHAPES = {"mixtral_small": Shape(1024, 1024, 12, 2), "qwen_small": Shape(1024, 256, 48, 8)}


@dataclass(frozen=True)
class Case:
    shape: str
    tokens: int
    """Tokens of each rank."""
    skewed: bool


def routes(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and weights that add up to one."""
    shape, random = SHAPES[case.shape], torch.Generator().manual_seed(rank)
    scores = torch.rand(case.tokens, shape.experts, generator=random)
    if case.skewed:
        chosen = torch.rand(case.tokens, generator=random) < 0.5
        hot = max(shape.experts // 8, 1)
        scores[:, :hot] += chosen[:, None].float()
    weights, experts = scores.topk(shape.choices, dim=-1)
    return experts, torch.softmax(weights, dim=-1).to(DTYPE)


def variants(case: Case, world: int, rank: int) -> dict[str, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import CONFIG_MAPPING
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from weaveopt.fabrics import shm, topology
    from weaveopt.fabrics.rows_call import memory_plan
    from weaveopt.integrations.transformers.expert_form import activation_of, call_of
    from weaveopt.ops.experts.by_expert import ExpertWeights
    from weaveopt.ops.experts.exchange.local_experts import expert_rows
    from weaveopt.ops.experts.sharded.op import SITES

    shape = SHAPES[case.shape]
    own = shape.experts // world
    config = CONFIG_MAPPING["mixtral"](
        hidden_size=shape.hidden, intermediate_size=shape.inner, num_local_experts=own,
        num_experts_per_tok=shape.choices, experts_implementation="grouped_mm",
    )  # fmt: skip
    experts = MixtralExperts(config).to(DTYPE).requires_grad_(False)
    experts._is_expert_parallel = True
    random = torch.Generator().manual_seed(100 + rank)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.copy_(torch.randn(weight.shape, generator=random) * weight.shape[-1] ** -0.5)
    x = torch.randn(case.tokens, shape.hidden, generator=random).to(DTYPE)
    ids, weights = routes(case, rank)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("experts", "batch"))
    theirs = AllToAllEP(experts, mesh["experts"], mesh["batch"])

    def gathered() -> Tensor:
        whole, every_id, every_weight = (
            torch.empty(world * case.tokens, each.shape[1], dtype=each.dtype) for each in (x, ids, weights)
        )
        for out, each in ((whole, x), (every_id, ids), (every_weight, weights)):
            dist.all_gather_into_tensor(out, each)
        remote = (every_id // own) != rank
        mine = torch.where(remote, own, every_id % own)
        partial = experts(whole, mine, every_weight.masked_fill(remote, 0.0))
        out = torch.empty_like(x)
        dist.reduce_scatter_tensor(out, partial)
        return out

    call = replace(
        call_of(activation_of(experts), GROUP, world, shape.hidden, "bfloat16", own, same_tokens=True),
        site=f"benchmark.{case}",
        fabric=Fabric.SHM, max_tokens=case.tokens, choices=shape.choices, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    plan = memory_plan(GROUP, [(call, SITES[Fabric.SHM].buffers(call))])
    shm.reserve(topology.discover(GROUP, TIMEOUT_S), plan, 0, TIMEOUT_S)
    operands = ExpertWeights(experts.gate_up_proj, None, experts.down_proj, None)

    def ours(**changes: object) -> Callable[[], Tensor]:
        text = replace(call, **changes).encode()  # type: ignore[arg-type]
        return lambda: torch.ops.weave.expert_exchange(x, ids, weights, *operands, text)  # type: ignore[no-any-return]

    rows = torch.randn(case.tokens * shape.choices, shape.hidden, generator=random).to(DTYPE)
    in_order = torch.arange(len(rows)) * own // len(rows)
    found: dict[str, Step] = {name: ours(batches=number) for name, number in BATCHES.items()}
    found[LIBRARY_OP] = ours(fabric=Fabric.LIBRARY, max_tokens=0)
    found[ALL_TO_ALL] = lambda: theirs(x, ids, weights)
    found[GATHER] = gathered
    want = theirs(x, ids, weights)
    for name, step in found.items():
        got = step()
        assert isinstance(got, Tensor)
        assert_close(got, want, LIBRARY, f"{name}, {case}", DTYPE)
    found[EXPERTS] = lambda: expert_rows(rows, in_order, operands, call)
    return found


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    import weaveopt.ops  # noqa: F401

    for case in cases:
        shape = SHAPES[case.shape]
        effort = Effort(3, max(2, 40 // (1 + case.tokens // 128)))
        us = host_us(place, variants(case, place.world, place.rank), effort, warm=1)
        yield record.row(
            case={
                "ranks": place.world, "tokens": case.tokens, "shape": case.shape, "hidden": shape.hidden,
                "inner": shape.inner, "experts": shape.experts, "choices": shape.choices, "skewed": case.skewed,
                "dtype": "bfloat16",
            },
            weave_us=us[WEAVE],
            baselines={name: us[name] for name in (ALL_TO_ALL, GATHER)},
            bound_us=us[EXPERTS],
            parameters={f"{name}_us": round(us[name], 3) for name in (*BATCHES, LIBRARY_OP)},
        )  # fmt: skip


SHAPE = Setting("shapes", tuple(SHAPES), quick=("qwen_small",), among=tuple(SHAPES))
SUITES = (
    Suite(
        "moe_sharded", "a mixture's tokens sharded over CPU ranks", Needs(CPU, 2, worlds=(2, 3, 4)),
        lambda asked: product(Case, asked.of(SHAPE), asked.of(TOKENS), (False, True)), rows,
        ours=(*BATCHES, LIBRARY_OP), baselines=(ALL_TO_ALL, GATHER), bound="the experts alone",
        settings=(SHAPE, TOKENS),
    ),
)  # fmt: skip
