from weaveopt.rewrites.moe_fused.rule import MoeFused

__all__ = ["MoeFused"]
