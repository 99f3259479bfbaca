"""The cost model: pure arithmetic on a machine's profile. No torch, no devices, no environment.

Every number is a function of the profile and the workload alone, so all ranks that hold the same profile
predict, and decide, the same.
"""

from weaveopt.cost_model.all_to_all import all_to_all_cost, busiest_bytes, imbalance, uneven_all_to_all_cost
from weaveopt.cost_model.alpha_beta import (
    Cost,
    Schedule,
    all_gather,
    multicast_one_shot,
    multicast_two_shot,
    one_shot,
    recursive_doubling,
    reduce_scatter,
    ring,
    two_shot,
)
from weaveopt.cost_model.attention import Attention, attention_us
from weaveopt.cost_model.batched import batched_product_us, grouped_product_us
from weaveopt.cost_model.between_hosts import hierarchical_cost, hierarchical_sent_cost, ring_cost, tree_cost
from weaveopt.cost_model.collectives import all_reduce_us, collective_us
from weaveopt.cost_model.contention import contention_probabilities, pull_slowdown, slowed_slices
from weaveopt.cost_model.estimate import estimate_all_reduce_norm, estimate_unfused
from weaveopt.cost_model.fused import Way, ways
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.kernels import memory_us, norm_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.overlap import (
    Demand,
    Together,
    power_slowdown,
    reserved_slowdown,
    shared_slowdown,
    together,
)
from weaveopt.cost_model.prefetch import (
    Prefetch,
    break_even_tokens,
    expert_parallel_us,
    fetch_us,
    num_missing_experts,
    operator_us,
    pull_us,
)
from weaveopt.cost_model.products import num_waves, product_us
from weaveopt.cost_model.profile import dumps, load, names
from weaveopt.cost_model.table import lowerings, one_shot_max_tokens, token_grid
from weaveopt.cost_model.wave_groups import SendingProduct, best_partition, perfect_overlap_us, pipeline_us
from weaveopt.cost_model.wave_split import Split, TiledProduct, free_split_points, smart_split, split_points

__all__ = [
    "Attention",
    "Cost",
    "Demand",
    "Machine",
    "Prefetch",
    "Schedule",
    "SendingProduct",
    "Split",
    "TiledProduct",
    "Together",
    "Way",
    "all_gather",
    "all_reduce_us",
    "all_to_all_cost",
    "attention_us",
    "batched_product_us",
    "best_partition",
    "break_even_tokens",
    "busiest_bytes",
    "collective_us",
    "contention_probabilities",
    "dumps",
    "estimate_all_reduce_norm",
    "estimate_unfused",
    "expert_parallel_us",
    "fetch_us",
    "free_split_points",
    "grouped_product_us",
    "hierarchical_cost",
    "hierarchical_sent_cost",
    "host_us",
    "imbalance",
    "load",
    "lowerings",
    "memory_us",
    "multicast_one_shot",
    "multicast_two_shot",
    "names",
    "norm_us",
    "num_missing_experts",
    "num_waves",
    "one_shot",
    "one_shot_max_tokens",
    "operator_us",
    "perfect_overlap_us",
    "pipeline_us",
    "power_slowdown",
    "product_us",
    "pull_slowdown",
    "pull_us",
    "recursive_doubling",
    "reduce_scatter",
    "reserved_slowdown",
    "ring",
    "ring_cost",
    "shared_slowdown",
    "slowed_slices",
    "smart_split",
    "split_points",
    "together",
    "token_grid",
    "tree_cost",
    "two_shot",
    "uneven_all_to_all_cost",
    "ways",
]
