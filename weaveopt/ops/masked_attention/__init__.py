"""`weave::masked_attention` and `key_ranges`: grouped attention that reads a mask, and only keys that it admits."""
