from weaveopt.rewrites.causal_attention.rule import CausalAttention

__all__ = ["CausalAttention"]
