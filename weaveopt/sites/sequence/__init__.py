"""Sites of sequence parallelism, in which activations are sharded by rows over the ranks."""
