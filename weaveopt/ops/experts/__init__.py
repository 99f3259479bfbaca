"""The experts of a mixture: `weave::moe_experts` on tokens that every rank has, and in `sharded` those that travel."""
