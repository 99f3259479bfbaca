from weaveopt.rewrites.expert_prefetch.rule import ExpertPrefetch as ExpertPrefetch

__all__ = ["ExpertPrefetch"]
