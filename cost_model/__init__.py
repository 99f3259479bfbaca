"""The cost model: pure arithmetic on a machine's profile. No torch, no devices, no environment.

Every number is a function of the profile and the workload alone, so all ranks that hold the same profile
predict, and decide, the same.
"""

from weaveopt.cost_model.alpha_beta import (
    Cost,
    Steps,
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
from weaveopt.cost_model.batched import batched_gemm_us, grouped_gemm_us
from weaveopt.cost_model.between_hosts import hierarchical_cost, hierarchical_sent_cost, ring_cost, tree_cost
from weaveopt.cost_model.choice import Choice, Gpu, choose
from weaveopt.cost_model.collectives import all_reduce_us, collective_us, library_algorithm, measured_parts_us
from weaveopt.cost_model.gemm import Gemm, gemm_us, num_waves
from weaveopt.cost_model.host import host_us
from weaveopt.cost_model.host_algorithms import HOST_ALGORITHMS, HostAlgorithm, HostAllReduce, HostTraffic, hosts_choice
from weaveopt.cost_model.host_schedules import host_schedule
from weaveopt.cost_model.kernels import kernel_us, memory_us, norm_us
from weaveopt.cost_model.machine import Machine
from weaveopt.cost_model.profile import dumps, load, names
from weaveopt.cost_model.schedule import Interval, Schedule, library_ctas, measured_contention, schedule
from weaveopt.cost_model.token_grid import token_grid

__all__ = [
    "HOST_ALGORITHMS",
    "Attention",
    "Choice",
    "Cost",
    "Gemm",
    "Gpu",
    "HostAlgorithm",
    "HostAllReduce",
    "HostTraffic",
    "Interval",
    "Machine",
    "Schedule",
    "Steps",
    "all_gather",
    "all_reduce_us",
    "attention_us",
    "batched_gemm_us",
    "choose",
    "collective_us",
    "dumps",
    "gemm_us",
    "grouped_gemm_us",
    "hierarchical_cost",
    "hierarchical_sent_cost",
    "host_schedule",
    "host_us",
    "hosts_choice",
    "kernel_us",
    "library_algorithm",
    "library_ctas",
    "load",
    "measured_contention",
    "measured_parts_us",
    "memory_us",
    "multicast_one_shot",
    "multicast_two_shot",
    "names",
    "norm_us",
    "num_waves",
    "one_shot",
    "recursive_doubling",
    "reduce_scatter",
    "ring",
    "ring_cost",
    "schedule",
    "token_grid",
    "tree_cost",
    "two_shot",
]
