"""`weave::expert_prefetch` on CPU ranks, against the same mixture with tokens exchanged, even and skewed routing.

One thread each, bf16; every rank has as many tokens of its own. `in_place` reads the peers' experts where they are
stored; `pulled` is the library form of independent ranks, which copies each missing expert that was chosen. The
baselines are `weave::expert_exchange` over shared memory and transformers' all-to-all. The routing is that of the suite
`moe_sharded`: with skew half of all tokens choose an eighth of the experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.ranks import Place
from benchmarks.suite import CPU, Asked, Needs, Setting, Suite, product
from benchmarks.suites.moe_sharded_cpu import ALL_TO_ALL, DTYPE, GROUP, SHAPES, TIMEOUT_S, Case, routes
from benchmarks.timing import Effort, Step, host_us
from tests.graphs.tolerances import LIBRARY, assert_close
from weaveopt.records.candidate import Fabric

TOKENS = Setting("tokens", (1, 8, 64, 512, 2048), "of a rank", quick=(8,))
IN_PLACE, PULLED, EXCHANGED = "in_place", "pulled", "exchanged"


class Experts:
    """One rank's weights as an exporter."""

    def __init__(self, weights: tuple[Tensor, ...]) -> None:
        self.weights = weights

    def exported(self) -> tuple[Tensor, ...]:
        return self.weights

    def moved(self) -> None:
        return None


def variants(case: Case, world: int, rank: int, kept: list[Experts]) -> dict[str, Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import CONFIG_MAPPING
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from weaveopt.fabrics import exported, shm, topology
    from weaveopt.fabrics.rows_call import memory_plan
    from weaveopt.integrations.transformers.expert_form import activation_of, call_of
    from weaveopt.ops.experts.exchange.call import SpreadExpertsCall
    from weaveopt.ops.experts.prefetch.call import ExpertPrefetchCall
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
    library = replace(
        call_of(activation_of(experts), GROUP, world, shape.hidden, "bfloat16", own, independent=True),
        site=f"benchmark.{case}",
        choices=shape.choices,
    )
    exchanged = replace(
        library, independent=False, same_tokens=True, fabric=Fabric.SHM, max_tokens=case.tokens, timeout_s=TIMEOUT_S,
        batches=1,
    )  # fmt: skip
    constants = {field.name: getattr(library, field.name) for field in fields(SpreadExpertsCall)}
    prefetched = ExpertPrefetchCall(**{**constants, "fabric": Fabric.SHM})
    plan = memory_plan(GROUP, [(exchanged, SITES[Fabric.SHM].buffers(exchanged))])
    shm.reserve(topology.discover(GROUP, TIMEOUT_S), plan, 0, TIMEOUT_S)
    kept[:] = [Experts((experts.gate_up_proj, experts.down_proj))]
    exported.register(GROUP, kept[0])
    exported.share(GROUP, TIMEOUT_S)
    operands = (experts.gate_up_proj, None, experts.down_proj, None)
    by_tokens, by_weights = torch.ops.weave.expert_exchange, torch.ops.weave.expert_prefetch
    texts = exchanged.encode(), library.encode(), prefetched.encode()
    found: dict[str, Step] = {
        IN_PLACE: lambda: by_weights(x, ids, weights, *operands, texts[2]),
        PULLED: lambda: by_tokens(x, ids, weights, *operands, texts[1]),
        EXCHANGED: lambda: by_tokens(x, ids, weights, *operands, texts[0]),
        ALL_TO_ALL: lambda: theirs(x, ids, weights),
    }
    want = theirs(x, ids, weights)
    for name, step in found.items():
        got = step()
        assert isinstance(got, Tensor)
        assert_close(got, want, LIBRARY, f"{name}, {case}", DTYPE)
    return found


def rows(place: Place, cases: Sequence[Case], asked: Asked) -> Iterator[record.Row]:
    import weaveopt.ops  # noqa: F401

    for case in cases:
        shape = SHAPES[case.shape]
        effort = Effort(3, max(2, 40 // (1 + case.tokens // 128)))
        kept: list[Experts] = []
        us = host_us(place, variants(case, place.world, place.rank, kept), effort, warm=1)
        yield record.row(
            case={
                "ranks": place.world, "tokens": case.tokens, "shape": case.shape, "hidden": shape.hidden,
                "inner": shape.inner, "experts": shape.experts, "choices": shape.choices, "skewed": case.skewed,
                "dtype": "bfloat16",
            },
            weave_us=us[IN_PLACE],
            baselines={name: us[name] for name in (EXCHANGED, ALL_TO_ALL)},
            parameters={f"{PULLED}_us": round(us[PULLED], 3)},
        )  # fmt: skip


SHAPE = Setting("shapes", tuple(SHAPES), quick=("qwen_small",), among=tuple(SHAPES))
SUITES = (
    Suite(
        "expert_prefetch", "a mixture's weights read by CPU ranks in each other's memory", Needs(CPU, 2, worlds=(2, 4)),
        lambda asked: product(Case, asked.of(SHAPE), asked.of(TOKENS), (False, True)), rows,
        ours=(IN_PLACE, PULLED), baselines=(EXCHANGED, ALL_TO_ALL), settings=(SHAPE, TOKENS),
    ),
)  # fmt: skip
