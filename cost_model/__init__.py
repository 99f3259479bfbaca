"""The cost model: pure arithmetic on a machine's profile. No torch, no devices, no environment.

Every number is a function of the profile and the workload alone, so all ranks that hold the same profile
predict, and decide, the same.
"""

from weaveopt.cost_model.attention import Attention, attention_us
from weaveopt.cost_model.batched import batched_product_us, grouped_product_us
from weaveopt.cost_model.collectives import all_reduce_us
from weaveopt.cost_model.estimate import estimate_all_reduce_norm, estimate_unfused
from weaveopt.cost_model.fused import Way, ways
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.kernels import memory_us, num_waves, product_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.profile import dumps, load, names
from weaveopt.cost_model.table import lowerings, one_shot_max_tokens

__all__ = [
    "Attention",
    "Machine",
    "Way",
    "all_reduce_us",
    "attention_us",
    "batched_product_us",
    "dumps",
    "estimate_all_reduce_norm",
    "estimate_unfused",
    "grouped_product_us",
    "host_us",
    "load",
    "lowerings",
    "memory_us",
    "names",
    "num_waves",
    "one_shot_max_tokens",
    "product_us",
    "ways",
]
