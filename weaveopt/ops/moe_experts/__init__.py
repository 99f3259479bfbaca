"""`weave::moe_experts`: the experts of a mixture, on tokens that every rank has."""
