from weaveopt.rewrites.hierarchical_all_reduce.rule import HierarchicalAllReduce

__all__ = ["HierarchicalAllReduce"]
