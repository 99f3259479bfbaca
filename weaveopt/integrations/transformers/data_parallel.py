"""Placement of a mixture for data-parallel ranks: attention, router and shared experts on all of them, experts spread.

transformers has no such configuration: `fsdp_size` shards the dense weights and gathers them in every layer, `tp_size`
splits attention, and a number of expert ranks has to divide the product of both. Here `fsdp_size` is the number of
ranks, for the mesh and the loader, and `dp_size`, by which transformers decides whether it applies FSDP2, is none:
`tests/experts/test_data_parallel.py` holds what that leans on.
"""

from __future__ import annotations

from transformers.distributed import DistributedConfig

from weaveopt.errors import WeaveError
from weaveopt.integrations.transformers.registration import INDEPENDENT, NAME


class DataParallelExperts(DistributedConfig):
    """Configuration for `from_pretrained`: each of `num_ranks` ranks has its own batch and its own experts.

        parallel = weaveopt.DataParallelExperts(num_ranks)
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=parallel)

    Attention, router and shared experts are replicated; experts are sharded while they are loaded, so no rank ever
    holds all. Ranks call the model together, as often as one another, and weaveopt chooses whether tokens or weights
    travel. With `independent` they promise nothing: any rank may call as often as it likes, and weights travel always.

    Raises `WeaveError` for fewer than two ranks.
    """

    def __init__(self, num_ranks: int, independent: bool = False) -> None:
        if num_ranks < 2:
            raise WeaveError(
                f"DataParallelExperts: asked to spread experts over {num_ranks}, expected at least 2 ranks: load the "
                "model without distributed_config"
            )
        implementation = INDEPENDENT if independent else NAME
        super().__init__(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=implementation)

    @property
    def dp_size(self) -> int:
        """Ranks that transformers applies FSDP2 to: none, where 1 would make no mesh."""
        return 0
